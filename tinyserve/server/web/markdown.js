// Markdown as DOM nodes. Text from a model is only ever put into text nodes and into the addresses of links that begin
// with http:, https: or mailto:. No HTML is parsed anywhere, so nothing in an answer can become an element or a script.

// Each line of a growing answer meets all of these 16 times a second. So none can match in more than one way, and what
// follows a mark is [^]*, which matches to the end whatever it is: a dot stops at some letters, and then all is tried again.
const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+([^]*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+([^]*)|\s*)$/;
const QUOTE = /^ {0,3}>\s?([^]*)$/;
const COLUMN = /^:?-+:?$/;
const MAX_DEPTH = 8;

function element(name, children = [], properties = {}) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

/** A fragment that shows `text`. */
export function render(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(...blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0));
  return fragment;
}

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    let match;
    if (!line.trim()) {
      at += 1;
    } else if ((match = FENCE.exec(line))) {
      const end = endOfFence(lines, at + 1, match[1]);
      found.push(code(lines.slice(at + 1, end).join("\n"), match[2].trim().split(/\s/, 1)[0]));
      at = end + 1;
    } else if ((match = HEADING.exec(line))) {
      found.push(element("h" + Math.min(match[1].length + 2, 6), inline(title(match[2]))));
      at += 1;
    } else if (RULE.test(line)) {
      found.push(element("hr"));
      at += 1;
    } else if (depth < MAX_DEPTH && QUOTE.test(line)) {
      const inner = [];
      while (at < lines.length && QUOTE.test(lines[at])) inner.push(QUOTE.exec(lines[at++])[1]);
      found.push(element("blockquote", blocks(inner, depth + 1)));
    } else if (depth < MAX_DEPTH && ITEM.test(line)) {
      const [list, next] = listAt(lines, at, depth);
      found.push(list);
      at = next;
    } else if (line.includes("|") && isDivider(lines[at + 1] ?? "")) {
      const [table, next] = tableAt(lines, at);
      found.push(table);
      at = next;
    } else {
      const start = at++;
      while (at < lines.length && lines[at].trim() && !begins(lines[at])) at += 1;
      found.push(element("p", paragraph(lines.slice(start, at))));
    }
  }
  return found;
}

function begins(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

/** A heading's text: without the marks that may close it. */
function title(text) {
  const all = text.trim();
  let end = all.length;
  while (all[end - 1] === "#") end -= 1;
  return !end || /\s/.test(all[end - 1]) ? all.slice(0, end).trimEnd() : all;
}

/** Whether a line stands between a table's head and its rows. */
function isDivider(line) {
  return !/[^-:|\s]/.test(line) && cells(line).every((cell) => COLUMN.test(cell));
}

function endOfFence(lines, at, mark) {
  while (at < lines.length) {
    const line = lines[at].trim();
    if (line.startsWith(mark) && !line.replaceAll(mark[0], "")) return at;
    at += 1;
  }
  return at; // the answer may still be growing
}

function code(text, language) {
  const copy = element("button", ["Copy"], { type: "button", className: "copy" });
  const bar = element("div", [element("span", [language || "code"], { className: "dim small" }), copy], { className: "bar" });
  return element("div", [bar, element("pre", [element("code", [text])], { tabIndex: 0 })], { className: "code-block" });
}

function listAt(lines, at, depth) {
  const [, , firstMark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(firstMark);
  const list = element(ordered ? "ol" : "ul");
  if (ordered) list.start = parseInt(firstMark, 10);
  const indent = ITEM.exec(lines[at])[1].length;
  while (at < lines.length) {
    const match = ITEM.exec(lines[at]);
    if (!match || match[1].length < indent || match[1].length > indent + 1 || /\d/.test(match[2]) !== ordered) break;
    const inner = [match[3] ?? ""];
    at += 1;
    while (at < lines.length) {
      const line = lines[at];
      const deeper = /^\s*/.exec(line)[0].length > indent + 1;
      const nextIsDeeper = !line.trim() && /^\s*/.exec(lines[at + 1] ?? "")[0].length > indent + 1 && lines[at + 1]?.trim();
      const goesOn = line.trim() && !begins(line) && lines[at - 1].trim();
      if (!deeper && !nextIsDeeper && !goesOn) break;
      inner.push(line.slice(Math.min(indent + 2, /^\s*/.exec(line)[0].length)));
      at += 1;
    }
    const children = blocks(inner, depth + 1);
    const only = children.length && children[0].tagName === "P" ? [...children[0].childNodes, ...children.slice(1)] : children;
    list.append(element("li", only));
    while (at + 1 < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1])) at += 1;
  }
  return [list, at];
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function tableAt(lines, at) {
  const row = (line, name) => element("tr", cells(line).map((cell) => element(name, inline(cell))));
  const head = element("thead", [row(lines[at], "th")]);
  const body = element("tbody");
  at += 2;
  while (at < lines.length && lines[at].includes("|")) body.append(row(lines[at++], "td"));
  return [element("table", [head, body]), at];
}

function paragraph(lines) {
  const nodes = [];
  lines.forEach((line, index) => {
    nodes.push(...inline(line.trimEnd()));
    if (index + 1 < lines.length) nodes.push(/ {2}$|\\$/.test(line) ? element("br") : "\n");
  });
  return nodes;
}

// One alternative per kind; none of them can match in more than one way, so a hostile text takes no longer than others.
const INLINE = /(`+)([^`]|[^`][^]*?[^`])\1(?!`)|\*\*(?=\S)([^*]+)\*\*|__(?=\S)([^_]+)__|\*(?=[^\s*])([^*]+)\*|(?<![\w_])_(?=[^\s_])([^_]+)_(?![\w_])|~~([^~]+)~~|\[([^\][]*)\]\(([^()\s]+)(?:\s+"[^"]*")?\)|\\([\\`*_{}[\]()#+\-.!|~>])/;
const MAX_INLINE = 8000;

function inline(text, depth = 0) {
  const nodes = [];
  if (depth > MAX_DEPTH || text.length > MAX_INLINE) return [text];
  let match;
  while ((match = INLINE.exec(text))) {
    if (match.index) nodes.push(text.slice(0, match.index));
    nodes.push(styled(match, depth));
    text = text.slice(match.index + match[0].length);
  }
  if (text) nodes.push(text);
  return nodes;
}

function styled([whole, , verbatim, strong, strong2, soft, soft2, gone, label, address, escaped], depth) {
  if (verbatim !== undefined) return element("code", [verbatim]);
  if (strong ?? strong2) return element("strong", inline(strong ?? strong2, depth + 1));
  if (soft ?? soft2) return element("em", inline(soft ?? soft2, depth + 1));
  if (gone) return element("del", inline(gone, depth + 1));
  if (address !== undefined) return link(label, address, whole, depth);
  return escaped;
}

function link(label, address, whole, depth) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return whole; // a relative address would lead to this server
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return whole;
  return element("a", inline(label || address, depth + 1), { href: url.href, rel: "noopener noreferrer", target: "_blank" });
}
