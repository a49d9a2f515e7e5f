// Formulas in Markdown: $…$ and \(…\) in a line, $$…$$ and \[…\] as a block. Temml makes MathML of them.

import {element} from "./dom.js";

const MARKS = [["$$", "$$"], ["\\[", "\\]"], ["\\(", "\\)"], ["$", "$"]];
const DOLLAR = 36, BACKSLASH = 92;

/** Extension of the parser of Markdown; formulas are found before the escapes of brackets. */
export const FORMULAS = {
  defineNodes: ["Formula"],
  parseInline: [{name: "Formula", parse: findFormula, before: "Escape"}],
};

function findFormula(context, next, at) {
  if (next !== DOLLAR && next !== BACKSLASH) return -1;
  const text = context.slice(at, context.end), marks = MARKS.find(([begin]) => text.startsWith(begin));
  if (!marks) return -1;
  const [begin, end] = marks, length = text.indexOf(end, begin.length);
  if (length <= begin.length) return -1;
  // A price is no formula: "$5 and $6" has a space before the second sign, "$5-$6" a digit after it.
  const inside = text.slice(begin.length, length);
  if (begin === "$" && (inside !== inside.trim() || /`/.test(inside) || /\d/.test(text[length + 1] ?? ""))) return -1;
  return context.addElement(context.elt("Formula", at, at + length + end.length));
}

/** The element of a formula; one that cannot be read is shown with its fault. */
export function formula(source) {
  const [begin, end] = MARKS.find(([first]) => source.startsWith(first));
  const box = element("span", "formula"), isBlock = begin === "$$" || begin === "\\[";
  box.title = source;
  globalThis.temml.render(source.slice(begin.length, -end.length), box, {displayMode: isBlock, throwOnError: false});
  return box;
}
