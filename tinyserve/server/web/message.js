// How one message looks: Markdown, the folded thought, the view of its tokens, and the buttons below it.

import { render } from "./markdown.js";

const NAMES = { user: "You", assistant: "Answer", system: "System" };

export function element(name, children = [], properties = {}) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

function button(label, name) {
  return element("button", [label], { type: "button", className: name });
}

/** Text and thought of a message; a server without a parser for thoughts leaves their marks in the text. */
export function parts(message) {
  const match = message.reasoning ? null : /^\s*<think>([^]*?)(?:<\/think>|$)/.exec(message.content);
  if (!match) return { text: message.content, thought: message.reasoning ?? "" };
  return { text: message.content.slice(match[0].length).trimStart(), thought: match[1].trim() };
}

/** An article that shows a message and can be shown again as it grows. */
export class MessageView {
  constructor(message, { onCopy, onRegenerate, onEdit }) {
    this.message = message;
    this.showsTokens = false;
    this.body = element("div", [], { className: "body" });
    this.tools = element("div", [], { className: "tools" });
    this.node = element("article", [element("h2", [NAMES[message.role] ?? message.role]), this.body, this.tools]);
    this.node.className = message.role;
    this.handlers = { onCopy, onRegenerate, onEdit };
    this.thought = null;
    this.show();
  }

  /** Show the message as it is now. working: whether it still grows. */
  show(working = false) {
    this.body.classList.toggle("working", working);
    this.body.setAttribute("aria-busy", String(working));
    if (this.message.role === "user") {
      this.body.textContent = this.message.content;
    } else {
      const { text, thought } = parts(this.message);
      const answer = this.showsTokens ? tokens(this.message.tokens) : render(text);
      this.body.replaceChildren(...this.#thought(thought, working && !text), answer);
    }
    if (this.message.error) this.body.append(element("p", [this.message.error], { className: "failure" }));
    this.body.querySelector(".failure")?.setAttribute("role", "alert");
    this.#buttons(working);
  }

  #thought(thought, working) {
    if (!thought) return [];
    if (!this.thought) {
      this.thought = element("details", [element("summary"), element("div", [], { className: "text" })]);
      this.thought.className = "thought";
    }
    this.thought.firstChild.textContent = working ? "Thinking …" : "Thought";
    this.thought.lastChild.textContent = thought;
    return [this.thought];
  }

  #buttons(working) {
    this.tools.replaceChildren();
    if (working) return;
    const copy = button("Copy", "copy-all");
    copy.onclick = () => this.handlers.onCopy(this.message, copy);
    this.tools.append(copy);
    if (this.message.role === "user") {
      const edit = button("Edit", "edit");
      edit.onclick = () => this.handlers.onEdit(this.message);
      this.tools.append(edit);
      return;
    }
    const again = button("Regenerate", "regenerate");
    again.onclick = () => this.handlers.onRegenerate(this.message);
    this.tools.append(again);
    if (this.message.tokens?.length) {
      const view = button(this.showsTokens ? "Text" : "Tokens", "token-view");
      view.setAttribute("aria-pressed", String(this.showsTokens));
      view.onclick = () => {
        this.showsTokens = !this.showsTokens;
        this.show();
        this.tools.querySelector(".token-view").focus();
      };
      this.tools.append(view);
    }
    if (this.message.note) this.tools.append(element("span", [this.message.note], { className: "dim small" }));
  }
}

/** Every token as a button; the less likely it was, the stronger its line. */
function tokens(list) {
  const places = list.map(({ token, logprob, top }) => {
    const chance = Math.exp(logprob);
    const level = chance > 0.8 ? 4 : chance > 0.5 ? 3 : chance > 0.2 ? 2 : chance > 0.05 ? 1 : 0;
    const place = button(token || "∅", `p${level}`);
    place.setAttribute("aria-label", `${spoken(token)}, ${percent(chance)}`);
    place.alternatives = { token, chance, top };
    return place;
  });
  return element("div", places, { className: "tokens" });
}

/** The table for the tip over a token. */
export function alternatives({ token, chance, top }) {
  const rows = top.some((other) => other.token === token) ? top : [{ token, logprob: Math.log(chance) }, ...top];
  const lines = rows.map((other) =>
    element("tr", [element("td", [spoken(other.token)]), element("td", [percent(Math.exp(other.logprob))])], {
      className: other.token === token ? "chosen" : "",
    }),
  );
  return element("table", lines);
}

const spoken = (token) => JSON.stringify(token);
const percent = (chance) => `${(100 * chance).toFixed(chance > 0.1 ? 0 : 2)} %`;
