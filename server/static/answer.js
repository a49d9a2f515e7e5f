// The text of an answer: each part with the colour and tooltip of its origin, as Markdown or as it was written.

import {element, patch} from "./dom.js";
import {blocksOf} from "./markdown.js";
import {drafterOf, runsOf} from "./origin.js";

/** The class of a draft's colour; the target's own tokens (0) and text without a known origin (null) are plain. */
const style = draft => draft ? "draft-" + Math.min(draft, 5) : "";

/** Show an answer's thought and text in two boxes, or what they have grown by.
 *
 * isWhole: begin again, else blocks before the last two stay as they are; isMarkdown: of the text, not of the thought.
 */
export function paint(boxes, {thought, text, steps}, isMarkdown, isWhole) {
  const runs = steps.length ? runsOf(thought + text, steps) : [{text: thought + text, draft: null, step: -1}];
  const origins = new Origins(runs, steps), begin = thought.length, end = begin + text.length;
  patch(boxes.thought, origins.spans(0, begin));
  boxes.text.classList.toggle("markdown", isMarkdown);
  if (!isMarkdown) return patch(boxes.text, origins.spans(begin, end));
  const {from, numBlocks} = isWhole ? {from: 0, numBlocks: 0} : boxes.settled;
  const start = begin + from;
  const {elements, begins} = blocksOf(text.slice(from), (first, last) => origins.spans(start + first, start + last));
  patch(boxes.text, elements, numBlocks);
  const numSettled = Math.max(0, elements.length - 2);
  boxes.settled = {from: from + (numSettled ? begins[numSettled] : 0), numBlocks: numBlocks + numSettled};
}

/** Runs of a text by their first character. */
class Origins {
  constructor(runs, steps) {
    let at = 0;
    this.steps = steps;
    this.runs = runs.map(run => ({...run, from: at, to: at += run.text.length}));
  }

  /** The spans of the characters of a range. */
  spans(from, to) {
    const spans = [];
    for (let i = this.indexOf(from); i < this.runs.length && this.runs[i].from < to; i++) {
      const run = this.runs[i], text = run.text.slice(Math.max(0, from - run.from), to - run.from);
      if (text) spans.push(this.span(run, text));
    }
    return spans;
  }

  /** The number of the run that has a character. */
  indexOf(character) {
    let low = 0, high = this.runs.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.runs[middle].to <= character) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  span({draft, step}, text) {
    const made = element("span", style(draft), text);
    if (draft !== null) made.title = `step ${step + 1}: ` + (draft
      ? `accepted from draft ${draft} (${drafterOf(this.steps[step], draft)})` : "the target's own token");
    return made;
  }
}
