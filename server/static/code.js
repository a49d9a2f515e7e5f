// Colours of code: a parser of its language is loaded when the first code in it is shown.

import {classHighlighter, highlightTree} from "@lezer/highlight";
import {element} from "./dom.js";

const lezer = (name, dialect = "") => () => import(`@lezer/${name}`).then(({parser}) => dialect ? parser.configure({dialect}) : parser);
const LOADERS = {
  python: lezer("python"), javascript: lezer("javascript", "jsx"), typescript: lezer("javascript", "ts jsx"),
  json: lezer("json"), cpp: lezer("cpp"), rust: lezer("rust"), go: lezer("go"), java: lezer("java"),
  css: lezer("css"), html: lezer("html"), yaml: lezer("yaml"),
};
const NAMES = {
  py: "python", python3: "python", js: "javascript", jsx: "javascript", mjs: "javascript", ts: "typescript", tsx: "typescript",
  jsonc: "json", jsonl: "json", c: "cpp", h: "cpp", "c++": "cpp", cc: "cpp", hpp: "cpp", rs: "rust", golang: "go",
  htm: "html", xml: "html", svg: "html", yml: "yaml",
};
const parsers = {};

/** The parser of a language; null of one without, and until it is loaded. An event of the document says that it is. */
function parserOf(written) {
  const word = written.trim().split(/[\s{,:]/)[0].toLowerCase(), language = NAMES[word] ?? word;
  if (!Object.hasOwn(LOADERS, language)) return null;
  if (!(language in parsers)) {
    parsers[language] = null;
    LOADERS[language]().then(parser => {
      parsers[language] = parser;
      document.dispatchEvent(new Event("language"));
    }, error => console.error(error));
  }
  return parsers[language];
}

/** The nodes that show the lines of a code, [{from, to}] of the text; textOf(from, to) shows a range of it. */
export function coloured(text, lines, language, textOf) {
  const parser = parserOf(language), plain = (from, to) => lines.flatMap(line => {
    const first = Math.max(from, line.at), last = Math.min(to, line.at + line.to - line.from);
    return first < last ? textOf(line.from + first - line.at, line.from + last - line.at) : [];
  });
  let length = 0;
  for (const line of lines) {
    line.at = length;
    length += line.to - line.from;
  }
  if (!parser) return plain(0, length);
  const made = [], code = lines.map(line => text.slice(line.from, line.to)).join("");
  let at = 0;
  highlightTree(parser.parse(code), classHighlighter, (from, to, classes) => {
    made.push(...plain(at, from), element("span", classes, null, ...plain(from, to)));
    at = to;
  });
  return [...made, ...plain(at, length)];
}
