// The conversations of this browser, one record each, in its database.

const STORE = "conversations", LIST = "list";
let opened = null, last = Promise.resolve();

const result = request => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

function database() {
  const request = indexedDB.open("polydraft", 1);
  request.onupgradeneeded = () =>
    request.result.createObjectStore(STORE, {keyPath: "id"}).createIndex(LIST, ["changed", "name"]);
  return result(request);
}

async function store(mode) {
  opened ??= database();
  return (await opened).transaction(STORE, mode).objectStore(STORE);
}

/** Names of all conversations, newest first: [{id, name}]. The index has them, so that no text is read. */
export async function names() {
  const found = [], request = (await store("readonly")).index(LIST).openKeyCursor(null, "prev");
  for (let cursor = await result(request); cursor; cursor = await result(request)) {
    found.push({id: cursor.primaryKey, name: cursor.key[1]});
    cursor.continue();
  }
  return found;
}

/** Use the store after all that was begun before. */
const inTurn = use => last = last.catch(() => {}).then(use);

const stored = async id => result((await store("readonly")).get(id));

export const read = id => inTurn(() => stored(id));

export const remove = id => inTurn(async () => result((await store("readwrite")).delete(id)));

/** Store a conversation. If another tab has stored it meanwhile, both stay: this one becomes a copy. */
export const write = talk => inTurn(async () => {
  const before = await stored(talk.id);
  if (before && before.changed !== talk.changed) talk.id += "-" + Date.now().toString(36);
  talk.changed = Date.now();
  return result((await store("readwrite")).put(talk.record()));
});
