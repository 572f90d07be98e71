// Conversations and settings, kept in this browser. A chat: {id, title, messages: [{role, content, reasoning, tokens}]}.

const CHATS = "tinyserve.chats";
const SETTINGS = "tinyserve.settings";
const KEY = "tinyserve.key";
const DELETED = "tinyserve.deleted"; // ids of chats, so that no other page that has one open brings it back
const MOST = 100;

function read(storage, name, otherwise) {
  try {
    return JSON.parse(storage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise; // storage is switched off, or holds what somebody else wrote
  }
}

function write(storage, name, value) {
  try {
    storage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

const isText = (value) => typeof value === "string";

const isToken = (value) => value && isText(value.token) && Array.isArray(value.top) && value.top.every((one) => one && isText(one.token));

function isMessage(value) {
  if (!value || !isText(value.content) || !["user", "assistant"].includes(value.role)) return false;
  const texts = [value.reasoning, value.error, value.note].filter((one) => one !== undefined);
  return texts.every(isText) && (value.tokens === undefined || (Array.isArray(value.tokens) && value.tokens.every(isToken)));
}

/** What is stored now. Somebody else may have written it: an entry that the page could not show is passed over. */
export function loadChats() {
  const found = read(localStorage, CHATS, []);
  if (!Array.isArray(found)) return [];
  return found.filter((chat) => chat && isText(chat.id) && isText(chat.title) && Array.isArray(chat.messages) && chat.messages.every(isMessage));
}

/** Store one chat as it is now. Other pages store theirs in the same list, so that is read anew; one may have deleted it. */
export function saveChat(chat) {
  if (isForgotten(chat)) return;
  const chats = loadChats();
  const at = chats.findIndex((other) => other.id === chat.id);
  if (at < 0) chats.unshift(chat);
  else chats[at] = chat;
  store(chats.filter((one) => one.messages.length));
}

export function forgetChat(chat) {
  write(localStorage, DELETED, [chat.id, ...deleted()].slice(0, MOST));
  store(loadChats().filter((other) => other.id !== chat.id));
}

/** Whether a chat was deleted, here or in another page. */
export const isForgotten = (chat) => deleted().includes(chat.id);

function deleted() {
  const found = read(localStorage, DELETED, []);
  return Array.isArray(found) ? found : [];
}

/** Call back when another page has stored something. */
export function onOthers(changed) {
  addEventListener("storage", (event) => event.key === CHATS && changed());
}

/** Keep the newest chats; when the browser has no room, older ones go, and token details before them. */
function store(chats) {
  let kept = chats.slice(0, MOST);
  if (write(localStorage, CHATS, kept)) return;
  kept = kept.map((chat) => ({ ...chat, messages: chat.messages.map(({ tokens, ...message }) => message) }));
  while (kept.length && !write(localStorage, CHATS, kept)) kept = kept.slice(0, Math.floor(kept.length / 2));
}

export const loadSettings = () => read(localStorage, SETTINGS, {});
export const saveSettings = (settings) => write(localStorage, SETTINGS, settings);
export const loadKey = () => read(sessionStorage, KEY, "");
export const saveKey = (key) => write(sessionStorage, KEY, key);
