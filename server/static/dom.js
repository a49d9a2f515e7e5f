// Elements, made from values. Every text is set as text: nothing here reads markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = id => document.getElementById(id);

/** An element with a class, a text and children. */
export function element(tag, name = "", text = null, ...children) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text != null) made.textContent = text;
  made.append(...children);
  return made;
}

/** A button that submits nothing. */
export function button(text, onClick, label = "") {
  const made = element("button", "quiet", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", onClick);
  return made;
}

/** Put a text into the clipboard, also where the page is not served over TLS, and say so on the button. */
export async function copyFor(pressed, text) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else {
    const area = element("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  pressed.textContent = "Copied";
  setTimeout(() => { pressed.textContent = "Copy"; }, 1500);
}

/** Make an element's children, from a number on, these nodes. Equal ones stay, and what is selected in them. */
export function patch(shown, nodes, first = 0) {
  nodes.forEach((node, i) => {
    const old = shown.childNodes[first + i];
    if (!old) shown.append(node);
    else if (old.isEqualNode(node)) return;
    else if (old.nodeType === Node.TEXT_NODE && node.data?.startsWith(old.data)) old.appendData(node.data.slice(old.length));
    else if (old.cloneNode(false).isEqualNode(node.cloneNode(false)) && old.hasChildNodes()) patch(old, [...node.childNodes]);
    else old.replaceWith(node);
  });
  while (shown.childNodes.length > first + nodes.length) shown.lastChild.remove();
}

/** An element of a drawing. */
export function shape(tag, attributes = {}, text = null) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text != null) made.textContent = text;
  return made;
}

/** A number with its unit; a dash if there is none. */
export function shown(value, digits = 2, unit = "") {
  if (value == null || !Number.isFinite(value)) return "–";
  return value.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits}) + unit;
}

/** A count with its noun: "1 token", "2 tokens". */
export const counted = (count, noun, several = noun + "s") => `${shown(count, 0)} ${count === 1 ? noun : several}`;
