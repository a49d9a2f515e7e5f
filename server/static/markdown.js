// Markdown as elements. The parser finds ranges of the source; elements are made here, and every text is set as text.

import {GFM, parser} from "@lezer/markdown";
import {coloured} from "./code.js";
import {element} from "./dom.js";
import {FORMULAS, formula} from "./formulas.js";

// Without headings that are underlined: each list after a line would be one until its first item has a text.
const PARSER = parser.configure([GFM, FORMULAS, {remove: ["SetextHeading"]}]);
const MOST_NESTED = 40;
const TAGS = {
  Paragraph: "p", Task: "span", Blockquote: "blockquote", BulletList: "ul", OrderedList: "ol", ListItem: "li",
  TableHeader: "tr", TableRow: "tr", Emphasis: "em", StrongEmphasis: "strong", Strikethrough: "s", InlineCode: "code",
};
/** Elements that have other elements alone: the text between these is white space and marks. */
const HAS_NO_TEXT = new Set(["Blockquote", "BulletList", "OrderedList", "ListItem"]);
const MARKS = new Set(["HeaderMark", "EmphasisMark", "CodeMark", "ListMark", "QuoteMark", "StrikethroughMark"]);
const SCHEMES = new Set(["http", "https", "mailto"]);

/** Return the elements of a text's blocks, and where each block's first line begins.
 *
 * textOf(from, to): the nodes that show a range of the text.
 */
export function blocksOf(text, textOf) {
  const writer = new Writer(text, textOf), elements = [], begins = [];
  for (const node of childrenOf(PARSER.parse(text).topNode)) {
    elements.push(element("div", "", null, ...writer.write(node, 0)));
    begins.push(text.lastIndexOf("\n", node.from) + 1);
  }
  return {elements, begins};
}

function childrenOf(node) {
  const children = [];
  for (let child = node.firstChild; child; child = child.nextSibling) children.push(child);
  return children;
}

/** The address of a link; null for scripts, data and addresses of this server. */
function linkTo(written) {
  const address = written.replace(/^<(.*)>$/, "$1");
  try {
    return SCHEMES.has(new URL(address).protocol.slice(0, -1)) ? address : null;
  } catch {
    return null; // without a scheme
  }
}

class Writer {
  constructor(text, textOf) {
    this.text = text;
    this.textOf = textOf;
  }

  source(node) {
    return this.text.slice(node.from, node.to);
  }

  /** The nodes that show a part of the tree. */
  write(node, depth) {
    const {name} = node;
    if (MARKS.has(name)) return [];
    if (depth > MOST_NESTED) return this.textOf(node.from, node.to);
    if (name === "Link" || name === "Image") return this.link(node, depth);
    if (name === "URL" || name === "Autolink") return this.address(node);
    if (name === "FencedCode" || name === "CodeBlock") return [this.code(node)];
    if (name === "Formula") return [formula(this.source(node))];
    if (name === "Table") return [this.table(node, depth)];
    if (name === "HorizontalRule") return [element("hr")];
    if (name === "HardBreak" || (name === "HTMLTag" && /^<br ?\/?>$/i.test(this.source(node)))) return [element("br")];
    if (name === "Escape") return this.textOf(node.from + 1, node.to);
    if (name === "TaskMarker") return [element("span", "", this.source(node) === "[ ]" ? "☐" : "☑")];
    const tag = TAGS[name] ?? (name.startsWith("ATXHeading") ? "h" + name.at(-1) : null);
    // Everything else is shown as it is written: HTML, definitions of links, entities.
    if (!tag) return this.textOf(node.from, node.to);
    const made = element(tag, "", null, ...this.inside(node, depth));
    if (name === "OrderedList") made.start = parseInt(this.source(node.getChild("ListItem")), 10);
    return [made];
  }

  /** The nodes that show the children of a node, and the text between them if it may have some. */
  inside(node, depth, from = node.from, to = node.to) {
    const hasText = !HAS_NO_TEXT.has(node.name), made = [];
    let at = from;
    for (const child of childrenOf(node)) {
      if (child.from < from || child.to > to) continue;
      if (hasText) made.push(...this.textOf(at, child.from));
      made.push(...this.write(child, depth + 1));
      at = child.to;
    }
    if (hasText) made.push(...this.textOf(at, to));
    return made;
  }

  /** A link, also to an image, which the page does not load; the source if there is no address to go to. */
  link(node, depth) {
    const url = node.getChild("URL"), address = url && linkTo(this.source(url));
    if (!address) return this.textOf(node.from, node.to);
    const [begin, end] = node.getChildren("LinkMark");
    return [anchor(address, end.from > begin.to ? this.inside(node, depth, begin.to, end.from) : [address])];
  }

  address(node) {
    const url = node.name === "URL" ? node : node.getChild("URL"), address = linkTo(this.source(url));
    return address ? [anchor(address, this.textOf(url.from, url.to))] : this.textOf(node.from, node.to);
  }

  code(node) {
    const lines = node.getChildren("CodeText").map(({from, to}) => ({from, to})), info = node.getChild("CodeInfo");
    const language = info ? this.source(info) : "", copy = element("button", "quiet copy-code", "Copy");
    copy.type = "button";
    const bar = element("div", "code-bar", null, element("span", "", language), copy);
    const code = element("pre", "", null, element("code", "", null, ...coloured(this.text, lines, language, this.textOf)));
    code.tabIndex = 0;
    return element("div", "code", null, bar, code);
  }

  table(node, depth) {
    const sides = this.source(node.getChild("TableDelimiter")).replace(/^\s*\||\|\s*$/g, "").split("|")
      .map(cell => /:\s*$/.test(cell) ? (/^\s*:/.test(cell) ? "center" : "right") : "left");
    const row = (one, tag) => element("tr", "", null, ...this.cells(one).map((cell, column) =>
      element(tag, sides[column] ?? "left", null, ...cell ? this.inside(cell, depth) : [])));
    const head = element("thead", "", null, row(node.getChild("TableHeader"), "th"));
    const body = element("tbody", "", null, ...node.getChildren("TableRow").map(one => row(one, "td")));
    const box = element("div", "scroll", null, element("table", "", null, head, body));
    box.tabIndex = 0;
    return box;
  }

  /** The cells of a row; null for one without a text, which the parser leaves out. */
  cells(row) {
    const cells = [];
    let before = null;
    for (const child of childrenOf(row)) {
      if (child.name === "TableCell") cells.push(child);
      else if (before?.name === "TableDelimiter") cells.push(null);
      before = child;
    }
    return cells;
  }
}

function anchor(address, children) {
  const made = element("a", "", null, ...children);
  made.href = address;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}
