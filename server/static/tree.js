// A step's drafts as a tree: drafts that begin alike share a branch, and what was emitted is the top line.

import {element, shape} from "./dom.js";
import {drafterOf} from "./origin.js";

const ROW = 26, BOX = 20, GAP = 18, PAD = 6, LEFT = 12, LONGEST = 24;
const pen = document.createElement("canvas").getContext("2d");

const MEANING = {kept: "accepted", own: "the target's own token", rejected: "rejected", unread: "never looked at"};

/** The root of a step's drafts; a node has text, kind, drafts (numbers) and children. */
export function treeOf(step) {
  const root = {text: "", kind: "kept", drafts: [], children: []};
  const accepted = step.tokens.slice(0, step.num_accepted), own = step.tokens.slice(step.num_accepted);
  step.chains.forEach((chain, index) => {
    let node = root;
    chain.forEach((token, depth) => {
      let child = node.children.find(one => one.text === token);
      if (!child) {
        const kind = node.kind !== "kept" || depth >= step.tokens.length ? "unread"
          : token === accepted[depth] ? "kept" : "rejected";
        child = {text: token, kind, drafts: [], children: []};
        node.children.push(child);
      }
      child.drafts.push(index + 1);
      node = child;
    });
  });
  let last = root;
  for (const token of accepted) last = last.children.find(one => one.text === token) ?? last;
  for (const token of own) {
    const child = {text: token, kind: "own", drafts: [], children: []};
    last.children.push(child);
    last = child;
  }
  sort(root);
  return root;
}

/** Emitted tokens first, so that they make the top line. */
function sort(node) {
  const rank = {own: 0, kept: 1, rejected: 2, unread: 3};
  node.children.sort((one, other) => rank[one.kind] - rank[other.kind]);
  node.children.forEach(sort);
}

/** A token as one short line: spaces and line breaks are visible. */
export function label(token) {
  const line = token.replaceAll("\n", "↵").replaceAll("\t", "→").replace(/^ +| +$/g, spaces => "·".repeat(spaces.length)) || "∅";
  const letters = [...line];
  return letters.length > LONGEST ? letters.slice(0, LONGEST - 1).join("") + "…" : line;
}

/** A step as a picture with its caption. */
export function drawStep(number, step) {
  const box = element("figure", "step");
  const caption = step.chains.length
    ? `step ${number}: ${step.num_accepted} accepted, ${step.tokens.length - step.num_accepted} own`
    : `step ${number}: no drafts`;
  box.append(element("figcaption", "", caption), drawTree(treeOf(step), step, caption));
  return box;
}

function drawTree(root, step, caption) {
  pen.font = "13px ui-monospace, monospace";
  const width = node => Math.ceil(pen.measureText(label(node.text)).width) + 2 * PAD;
  const edges = shape("g", {class: "edges"}), boxes = shape("g");
  let rows = 0, right = 0;
  const place = (node, x, parent) => {
    const y = ROW * rows + ROW / 2;
    if (parent) {
      const middle = (parent.x + x) / 2;
      edges.append(shape("path", {d: `M${parent.x} ${parent.y}C${middle} ${parent.y} ${middle} ${y} ${x} ${y}`}));
      boxes.append(drawNode(node, x, y, width(node), step));
    }
    const end = {x: parent ? x + width(node) : x, y};
    right = Math.max(right, end.x);
    node.children.forEach((child, i) => {
      if (i) rows += 1;
      place(child, end.x + GAP, end);
    });
  };
  place(root, LEFT - 4, null);
  const size = {width: right + 4, height: ROW * (rows + 1)};
  const drawing = shape("svg", {...size, viewBox: `0 0 ${size.width} ${size.height}`, role: "img", "aria-label": caption});
  drawing.append(edges, shape("circle", {cx: LEFT - 4, cy: ROW / 2, r: 3, class: "root"}), boxes);
  const scroller = element("div", "scroll", null, drawing);
  scroller.tabIndex = 0;
  return scroller;
}

function drawNode(node, x, y, width, step) {
  const group = shape("g", {class: "node " + node.kind});
  const drafts = node.drafts.map(draft => `draft ${draft} (${drafterOf(step, draft)})`).join(", ");
  group.append(
    shape("title", {}, `${JSON.stringify(node.text)}: ${MEANING[node.kind]}${drafts ? "; " + drafts : ""}`),
    shape("rect", {x, y: y - BOX / 2, width, height: BOX, rx: 5}),
    shape("text", {x: x + PAD, y: y + 4.5}, label(node.text)),
  );
  return group;
}
