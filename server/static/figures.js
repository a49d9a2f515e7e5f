// The number under an answer, and its other figures for the tooltip.

import {byId, shown} from "./dom.js";
import {countsOf} from "./origin.js";

/** Figures of an answer: the one that is shown, and lines for its tooltip. */
export function figuresOf({metrics, steps, whyPlain}) {
  if (!metrics) return {shown: "", lines: []};
  const counts = metrics.speculative_decoding, lines = [`${shown(metrics.tokens_per_second, 0)} tokens a second`];
  if (metrics.time_to_first_token_ms != null) lines.push(`first token after ${shown(metrics.time_to_first_token_ms, 0)} ms`);
  if (!counts) return {shown: "no drafts: " + whyPlain, lines};
  lines.push(`${shown(counts.tokens_per_pass)} tokens per pass`, `${shown(counts.mean_acceptance_length)} in passes with drafts`,
    counts.speedup == null ? "speedup not measured yet" : `${shown(counts.speedup)}× the speed of plain decoding`,
    `rule ${counts.rule}`, ...countsOf(steps).filter(one => one.count).map(one => `${nameOf(one)}: ${one.count} tokens`));
  return {shown: gain(counts), lines};
}

function gain({speedup, tokens_per_pass}) {
  if (speedup == null) return `${shown(tokens_per_pass, 1)} tokens per pass`;
  const tenths = Math.round(10 * speedup);
  if (tenths === 10) return "as fast as plain decoding";
  return `${shown(tenths / 10, 1)}× ${tenths > 10 ? "faster" : "the speed of plain decoding"}`;
}

const nameOf = ({draft, drafter}) =>
  draft === 0 ? "the target's own" : drafter === "model" ? `draft ${draft}` : `draft ${draft} (${drafter})`;

/** The reason for an answer without drafts: settings, server, load or text. server: its speculation, in words. */
export function reason(isEnabled, server, metrics) {
  if (!isEnabled) return "they are switched off in the settings";
  if (server.startsWith("off")) return server.replace(/^off(, as )?/, "").trim() || "the server has none";
  return metrics.num_resting_passes ? "plain decoding was as fast at this load" : "none was found for this text";
}

/** Show the lines of the figure that has the pointer or the focus, next to it. */
export function startTooltip(list) {
  const tip = byId("tip");
  let figure = null;
  const place = () => {
    if (!figure) return;
    const {left, top, bottom} = figure.getBoundingClientRect(), {height, width} = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
    tip.style.top = `${top > height + 8 ? top - height - 4 : bottom + 4}px`;
  };
  const show = event => {
    figure = event.target.closest(".figure");
    if (!figure?.dataset.lines) return;
    tip.textContent = figure.dataset.lines;
    tip.showPopover();
    place();
  };
  const hide = () => {
    figure = null;
    tip.hidePopover();
  };
  list.addEventListener("scroll", place);
  for (const name of ["mouseover", "focusin", "click"]) list.addEventListener(name, show);
  for (const name of ["mouseout", "focusout"]) list.addEventListener(name, hide);
  addEventListener("keydown", event => { if (event.key === "Escape") hide(); });
}
