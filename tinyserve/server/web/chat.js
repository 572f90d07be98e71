// The page: conversations, settings, and one answer at a time. What is shown is made of DOM nodes only; see markdown.js.

import { chat as ask, models } from "./api.js";
import { forgetChat, isForgotten, loadChats, loadKey, loadSettings, onOthers, saveChat, saveKey, saveSettings } from "./history.js";
import { MessageView, alternatives, element } from "./message.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const REDRAW = 60; // milliseconds between two drawings of an answer that grows

const state = {
  chats: loadChats(),
  chat: null, // the one that is shown
  views: [],
  cards: [], // of /v1/models
  running: null, // the AbortController of the answer that is being made
  redraw: 0,
};

// ---- settings

function readSettings() {
  const found = { system: $("system").value, logprobs: $("logprobs").checked, stop: $("stop-texts").value };
  for (const name of NUMBERS) found[name] = $(name).value;
  return { ...found, model: $("model").value };
}

function showSettings(settings) {
  $("system").value = settings.system ?? "";
  $("logprobs").checked = Boolean(settings.logprobs);
  $("stop-texts").value = settings.stop ?? "";
  for (const name of NUMBERS) $(name).value = settings[name] ?? "";
  $("key").value = loadKey();
}

function request(messages) {
  const settings = readSettings();
  const body = { model: settings.model || undefined, messages: [] };
  if (settings.system.trim()) body.messages.push({ role: "system", content: settings.system });
  body.messages.push(...messages.filter((m) => !m.error || m.content).map(({ role, content }) => ({ role, content })));
  for (const name of NUMBERS) if (settings[name] !== "") body[name] = Number(settings[name]);
  const stops = settings.stop.split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

async function loadModels() {
  try {
    state.cards = await models(loadKey());
  } catch (error) {
    $("status").textContent = error.message;
    if (error.status === 401) openSettings("key");
    else setTimeout(loadModels, 3000); // the model is still loading
    return;
  }
  const wanted = loadSettings().model;
  $("model").replaceChildren(...state.cards.map((card) => element("option", [card.id], { value: card.id })));
  if (state.cards.some((card) => card.id === wanted)) $("model").value = wanted;
  fill();
}

function openSettings(focus = "system") {
  $("settings").showModal();
  $(focus).focus();
}

// ---- conversations

function newChat() {
  stop();
  state.chat = { id: newId(), title: "New chat", messages: [] };
  state.chats.unshift(state.chat);
  show();
  $("input").focus();
}

const newId = () => `${Date.now()}-${Math.random().toString(36).slice(2)}`;

function openChat(chat) {
  if (chat === state.chat) return;
  stop();
  state.chat = chat;
  show();
  $("sidebar").classList.remove("shown");
}

function deleteChat(chat) {
  if (chat === state.chat) stop();
  state.chats = state.chats.filter((other) => other !== chat);
  forgetChat(chat);
  if (chat === state.chat) state.chats.length ? openChat(state.chats[0]) : newChat();
  else listChats();
}

/** Another page has stored something: show its chats too; the one that is open here stays as it is. */
function readChats() {
  const open = state.chat;
  state.chats = loadChats().map((chat) => (chat.id === open.id ? open : chat));
  if (!state.chats.includes(open)) state.chats.unshift(open);
  listChats();
}

function listChats() {
  const rows = state.chats.map((chat) => {
    const open = element("button", [chat.title], { type: "button", className: "open", title: chat.title });
    if (chat === state.chat) open.setAttribute("aria-current", "page");
    open.onclick = () => openChat(chat);
    const remove = element("button", ["×"], { type: "button" });
    remove.setAttribute("aria-label", `Delete ${chat.title}`);
    remove.onclick = () => deleteChat(chat);
    return element("li", [open, remove]);
  });
  $("chats").replaceChildren(...rows);
}

function show() {
  listChats();
  state.views = state.chat.messages.map(view);
  const nothing = element("p", ["What would you like to know?"], { className: "empty" });
  $("messages").replaceChildren(...(state.views.length ? state.views.map((v) => v.node) : [nothing]));
  $("messages").scrollTop = $("messages").scrollHeight;
  fill();
}

function view(message) {
  return new MessageView(message, { onCopy, onRegenerate, onEdit });
}

function append(message) {
  if (!state.views.length) $("messages").replaceChildren();
  state.chat.messages.push(message);
  const made = view(message);
  state.views.push(made);
  $("messages").append(made.node);
  return made;
}

async function onCopy(message, from) {
  await copied(message.content, from);
}

async function copied(text, from) {
  try {
    await navigator.clipboard.writeText(text);
    from.textContent = "Copied";
  } catch {
    from.textContent = "Not allowed";
  }
  setTimeout(() => (from.textContent = "Copy"), 1500);
}

function onRegenerate(message) {
  stop();
  state.chat.messages.splice(state.chat.messages.indexOf(message));
  show();
  answer();
}

function onEdit(message) {
  stop();
  state.chat.messages.splice(state.chat.messages.indexOf(message));
  show();
  $("input").value = message.content;
  grow();
  $("input").focus();
}

// ---- an answer

async function answer() {
  const { chat } = state;
  const message = { role: "assistant", content: "", reasoning: "", tokens: [] };
  const body = request(chat.messages);
  const made = append(message);
  const run = (state.running = new AbortController());
  const begun = performance.now();
  let first = 0;
  let usage = null;
  busy(true);
  made.show(true);
  try {
    for await (const chunk of ask(body, loadKey(), run.signal)) {
      usage = chunk.usage ?? usage;
      if (take(message, chunk) && !first) first = performance.now();
      draw(made);
      speed(usage, first);
    }
  } catch (error) {
    if (error.name !== "AbortError") message.error = error.message;
    else message.note = "stopped";
    if (error.status === 401) openSettings("key");
  }
  finish(chat, made, run, { usage, begun, first });
}

/** Add a chunk to the message; whether it brought something to see. */
function take(message, chunk) {
  const choice = chunk.choices[0];
  if (!choice) return false;
  message.content += choice.delta.content ?? "";
  message.reasoning += choice.delta.reasoning ?? choice.delta.reasoning_content ?? "";
  for (const { token, logprob, top_logprobs } of choice.logprobs?.content ?? []) {
    message.tokens.push({ token, logprob, top: top_logprobs.map((t) => ({ token: t.token, logprob: t.logprob })) });
  }
  if (choice.finish_reason && choice.finish_reason !== "stop") message.note = `ended by ${choice.finish_reason}`;
  return Boolean(choice.delta.content || choice.delta.reasoning);
}

function draw(made) {
  if (state.redraw) return;
  state.redraw = setTimeout(() => {
    state.redraw = 0;
    const box = $("messages");
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
    made.show(state.running !== null);
    if (atEnd) box.scrollTop = box.scrollHeight;
  }, REDRAW);
}

function finish(chat, made, run, { usage, begun, first }) {
  clearTimeout(state.redraw);
  state.redraw = 0;
  const { message } = made;
  if (usage) {
    const waited = first ? `${((first - begun) / 1000).toFixed(1)} s to the first token` : "";
    const parts = [message.note, `${usage.completion_tokens} tokens`, rate(usage, first), waited];
    message.note = parts.filter(Boolean).join(", ");
    chat.used = usage.total_tokens;
  }
  if (!message.tokens.length) delete message.tokens;
  if (state.running === run) {
    state.running = null;
    busy(false);
  }
  made.show();
  $("status").textContent = message.error ? "" : `The answer is complete: ${message.note ?? ""}`;
  saveChat(chat);
  if (chat === state.chat) fill();
}

function stop() {
  state.running?.abort();
  state.running = null;
  busy(false);
}

function busy(on) {
  $("stop").hidden = !on;
  $("send").hidden = on;
}

function rate(usage, first) {
  const seconds = (performance.now() - first) / 1000;
  if (!first || usage.completion_tokens < 2 || seconds <= 0) return "";
  return `${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`;
}

function speed(usage, first) {
  if (!usage) return;
  $("speed").textContent = rate(usage, first);
  state.chat.used = usage.total_tokens;
  fill();
}

function fill() {
  const card = state.cards.find((one) => one.id === $("model").value);
  if (!card) return;
  const used = state.chat?.used ?? 0;
  $("fill").value = used / card.max_model_len;
  $("fill-text").textContent = `${used.toLocaleString("en")} of ${card.max_model_len.toLocaleString("en")} tokens`;
}

// ---- input

function send() {
  const text = $("input").value.trim();
  if (!text || state.running) return;
  if (!state.chat.messages.length) state.chat.title = text.slice(0, 60);
  if (isForgotten(state.chat)) state.chat.id = newId(); // another page deleted it, and here it goes on
  append({ role: "user", content: text });
  saveChat(state.chat);
  $("input").value = "";
  grow();
  listChats();
  $("messages").scrollTop = $("messages").scrollHeight;
  answer();
}

function grow() {
  $("input").style.height = "auto";
  $("input").style.height = `${$("input").scrollHeight + 2}px`;
}

function showTip(target) {
  if (!target.alternatives) return;
  const tip = $("tip");
  tip.replaceChildren(alternatives(target.alternatives));
  tip.hidden = false;
  const box = target.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  const below = box.bottom + 6 + tip.offsetHeight < innerHeight;
  tip.style.top = `${below ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("input").addEventListener("input", grow);
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  $("tip").hidden = true;
  if (!$("settings").open) stop();
});
$("stop").onclick = () => {
  stop();
  $("input").focus();
};
$("new").onclick = newChat;
$("menu").onclick = () => {
  const shown = $("sidebar").classList.toggle("shown");
  $("menu").setAttribute("aria-expanded", String(shown));
};
$("open-settings").onclick = () => openSettings();
$("reset").onclick = () => showSettings({});
$("settings").addEventListener("close", () => {
  saveSettings(readSettings());
  if ($("key").value !== loadKey() || !state.cards.length) {
    saveKey($("key").value);
    loadModels();
  }
});
$("model").onchange = () => {
  saveSettings(readSettings());
  fill();
};
$("messages").addEventListener("click", (event) => {
  if (event.target.classList.contains("copy")) {
    copied(event.target.closest(".code-block").querySelector("code").textContent, event.target);
  }
});
for (const kind of ["focusin", "mouseover"]) $("messages").addEventListener(kind, (event) => showTip(event.target));
for (const kind of ["focusout", "mouseout"]) $("messages").addEventListener(kind, () => ($("tip").hidden = true));

onOthers(readChats);
showSettings(loadSettings());
state.chats.length ? openChat(state.chats[0]) : newChat();
loadModels();
