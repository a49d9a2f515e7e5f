// A chart of lines over the last minutes. Points that make no line long enough to be seen are dots.

import {shape} from "./dom.js";

const HEIGHT = 120, LEFT = 36, BOTTOM = 16, TOP = 8, SHORT = 4;

/** Draw `points` ([{at, ...values}], oldest first) into an svg; lines: [[name of the value, class]]. */
export function drawChart(svg, points, lines, span_s) {
  const width = svg.clientWidth || 400, now = points.at(-1)?.at ?? 0;
  const most = Math.max(1, ...points.flatMap(point => lines.map(([name]) => point[name] ?? 0))) * 1.08;
  const x = at => LEFT + (1 - (now - at) / span_s) * (width - LEFT - 4);
  const y = value => HEIGHT - BOTTOM - value / most * (HEIGHT - BOTTOM - TOP);
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    const value = most / 1.08 * share;
    parts.push(shape("line", {x1: LEFT, x2: width, y1: y(value), y2: y(value), class: "grid"}),
      shape("text", {x: LEFT - 6, y: y(value) + 4, "text-anchor": "end"}, value >= 10 ? value.toFixed(0) : value.toFixed(1)));
  }
  parts.push(shape("text", {x: LEFT, y: HEIGHT - 2}, `${span_s / 60} minutes ago`),
    shape("text", {x: width - 4, y: HEIGHT - 2, "text-anchor": "end"}, "now"));
  for (const [name, style] of lines) {
    for (const run of runs(points, name)) {
      const places = run.map(point => [x(point.at).toFixed(1), y(point[name]).toFixed(1)]);
      parts.push(shape("path", {d: "M" + places.map(place => place.join(" ")).join("L"), class: style}));
      if (places.at(-1)[0] - places[0][0] < SHORT)
        for (const [cx, cy] of places) parts.push(shape("circle", {cx, cy, r: 2.5, class: style}));
    }
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.replaceChildren(...parts);
}

/** Neighbouring points that have a value. */
function runs(points, name) {
  const found = [];
  let isOpen = false;
  for (const point of points) {
    if (point[name] == null) { isOpen = false; continue; }
    if (isOpen) found.at(-1).push(point);
    else found.push([point]);
    isOpen = true;
  }
  return found;
}
