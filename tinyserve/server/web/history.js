// Conversations and settings, kept in this browser. A chat: {id, title, messages: [{role, content, reasoning, tokens}]}.

const CHATS = "tinyserve.chats";
const SETTINGS = "tinyserve.settings";
const KEY = "tinyserve.key";
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

export function loadChats() {
  const found = read(localStorage, CHATS, []);
  return Array.isArray(found) ? found.filter((chat) => chat && Array.isArray(chat.messages)) : [];
}

/** Keep the newest chats; when the browser has no room, older ones go, and token details before them. */
export function saveChats(chats) {
  let kept = chats.filter((chat) => chat.messages.length).slice(0, MOST);
  if (write(localStorage, CHATS, kept)) return;
  kept = kept.map((chat) => ({ ...chat, messages: chat.messages.map(({ tokens, ...message }) => message) }));
  while (kept.length && !write(localStorage, CHATS, kept)) kept = kept.slice(0, Math.floor(kept.length / 2));
}

export const loadSettings = () => read(localStorage, SETTINGS, {});
export const saveSettings = (settings) => write(localStorage, SETTINGS, settings);
export const loadKey = () => read(sessionStorage, KEY, "");
export const saveKey = (key) => write(sessionStorage, KEY, key);
