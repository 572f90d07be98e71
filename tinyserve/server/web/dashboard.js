// The dashboard: asks for the state once a second while it is looked at, and draws it.

import { loadKey, saveKey } from "./history.js";
import { element } from "./message.js";

const $ = (id) => document.getElementById(id);
const INTERVAL = 1000;
const COLOURS = { decode: "#3b82f6", prompt: "#f59e0b", free: "#94a3b833", found: "#84cc16aa", used: "#3b82f6", shared: "#a855f7" };
const OF_BLOCK = ["free", "found", "used", "shared"];
const WORDS = ["are free", "are free with a cached prefix", "are used", "are shared"];

let paused = false;

async function fetched(path) {
  const key = loadKey();
  const response = await fetch(path, { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  if (response.ok) return response;
  $("key-form").hidden = response.status !== 401;
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `The server answered ${response.status}.`);
}

async function tick() {
  if (!paused && !document.hidden) {
    try {
      show(await (await fetched("dashboard/state")).json());
      $("problem").hidden = $("key-form").hidden = true;
    } catch (error) {
      $("problem").textContent = error.message;
      $("problem").hidden = false;
    }
  }
  setTimeout(tick, INTERVAL);
}

function show(state) {
  const last = state.steps.filter((step) => step.age_ms < 5000);
  const seconds = last.length ? Math.max(last[0].age_ms / 1000, 0.001) : 1;
  const sum = (name) => last.reduce((total, step) => total + step[name], 0);
  numbers({
    "tokens/s": (sum("generated") / seconds).toFixed(1),
    "prompt tokens/s": (sum("prompt_tokens") / seconds).toFixed(1),
    running: state.running,
    waiting: state.waiting,
    "cache in use": `${(100 * state.kv_cache_usage).toFixed(1)} %`,
    "prefix hits": `${(100 * state.prefix_hit_rate).toFixed(1)} %`,
    preemptions: state.preemptions,
  });
  drawSteps(state.steps);
  drawBlocks(state.blocks);
  requests(state);
}

function numbers(values) {
  const pairs = Object.entries(values).map(([name, value]) =>
    element("div", [element("dt", [name]), element("dd", [String(value)])]),
  );
  $("numbers").replaceChildren(...pairs);
}

/** A canvas as wide as its place, in device pixels. */
function sized(canvas) {
  const scale = devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * scale;
  canvas.height = canvas.clientHeight * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return [pen, canvas.clientWidth, canvas.clientHeight];
}

function drawSteps(steps) {
  const [pen, width, height] = sized($("steps"));
  if (!steps.length) {
    $("steps-text").textContent = "No step yet.";
    return;
  }
  const shown = steps.slice(-150);
  const span = Math.max(shown.reduce((total, step) => total + step.ms, 0), 1);
  const most = Math.max(...shown.map((step) => step.tokens), 1);
  let x = width;
  for (const step of [...shown].reverse()) {
    const wide = (step.ms / span) * width;
    const bar = (count) => Math.max((count / most) * (height - 2), count ? 1 : 0);
    const prompt = bar(step.prompt_tokens);
    const decode = bar(step.tokens - step.prompt_tokens);
    x -= wide;
    const drawn = Math.max(wide - (wide > 3 ? 1 : 0), 0.5);
    pen.fillStyle = COLOURS.decode;
    pen.fillRect(x, height - decode, drawn, decode);
    pen.fillStyle = COLOURS.prompt;
    pen.fillRect(x, height - decode - prompt, drawn, prompt);
  }
  const times = shown.map((step) => step.ms).sort((a, b) => a - b);
  const middle = times[Math.floor(times.length / 2)];
  $("steps-text").textContent =
    `${shown.length} steps in ${(span / 1000).toFixed(2)} s; median ${middle.toFixed(1)} ms, ` +
    `longest ${times.at(-1).toFixed(1)} ms; up to ${most} tokens, last with ${shown.at(-1).sequences} sequences.`;
}

function drawBlocks({ map, stride, count, size }) {
  const canvas = $("blocks");
  const columns = Math.max(Math.floor(canvas.clientWidth / 9), 1);
  canvas.style.height = `${Math.ceil(map.length / columns) * 9}px`;
  const [pen] = sized(canvas);
  for (let index = 0; index < map.length; index += 1) {
    pen.fillStyle = COLOURS[OF_BLOCK[map[index]]];
    pen.fillRect((index % columns) * 9, Math.floor(index / columns) * 9, 8, 8);
  }
  const counts = [0, 0, 0, 0];
  for (const digit of map) counts[digit] += 1;
  const words = WORDS.map((name, kind) => `${counts[kind]} ${name}`).join(", ");
  const part = stride > 1 ? `One in ${stride} of ${count} blocks is shown; of these ` : `Of ${count} blocks `;
  $("blocks-text").textContent = `${part}${words}. ${size} tokens a block.`;
}

function requests({ sequences, running, waiting }) {
  const rows = sequences.map((one) => {
    const part = `${Math.min(100, Math.round((100 * one.computed) / one.prompt_tokens))} %`;
    const cells = [one.id, one.state, one.prompt_tokens, one.tokens, part, one.blocks, one.seconds.toFixed(1)];
    return element("tr", cells.map((cell) => element("td", [String(cell)])));
  });
  $("requests").replaceChildren(...rows);
  const hidden = running + waiting - sequences.length;
  $("more").textContent = hidden > 0 ? `and ${hidden} more` : sequences.length ? "" : "Nothing runs.";
}

$("pause").onclick = () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  $("pause").textContent = paused ? "Go on" : "Freeze view";
};
$("trace").onclick = async () => {
  const blob = await (await fetched("dashboard/trace")).blob();
  const link = element("a", [], { href: URL.createObjectURL(blob), download: "tinyserve-steps.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};
$("key-form").onsubmit = (event) => {
  event.preventDefault();
  saveKey($("key").value);
};
tick();
