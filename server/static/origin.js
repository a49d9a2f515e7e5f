// Which draft proposed each part of an answer, and what the target wrote itself.
//
// A step has drafted tokens (`chains`), and tokens for the answer (`tokens`); the first `num_accepted` of these were
// drafted. The text that a client reads may differ from the tokens' texts: special tokens and stop strings are left
// out, and a character may be spread over several tokens. The text is what counts; tokens only colour it.

/** The number of the draft that begins with the accepted tokens, from 1 on; 0 if none was accepted. */
export function winner(step) {
  if (!step.num_accepted) return 0;
  return 1 + step.chains.findIndex(chain => step.tokens.slice(0, step.num_accepted).every((token, i) => chain[i] === token));
}

/** Runs [{text, draft, step}] that together are `text`; draft 0 is the target, null is text without a known origin. */
export function runsOf(text, steps) {
  const runs = [];
  const add = (piece, draft, step) => {
    const last = runs.at(-1);
    if (last && last.draft === draft && last.step === step) last.text += piece;
    else runs.push({text: piece, draft, step});
  };
  // Since the last token that was found: the origin of the first that was not, and how much text may belong to them.
  let at = 0, missed = null, reach = 0;
  steps.forEach((step, number) => {
    const accepted = winner(step);
    step.tokens.forEach((token, i) => {
      const draft = i < step.num_accepted ? accepted : 0, isPart = token.includes("\ufffd");
      const found = token && !isPart ? placeOf(token, text, at, reach) : -1;
      if (found < 0) {
        missed ??= {draft, step: number};
        if (isPart) reach += token.length + 1;
        return;
      }
      if (found > at) add(text.slice(at, found), missed.draft, missed.step);
      add(token, draft, number);
      at = found + token.length;
      missed = null;
      reach = 0;
    });
  });
  if (at < text.length) add(text.slice(at), missed?.draft ?? null, missed?.step ?? -1);
  return runs;
}

/** Where a token's text begins, from `at` to `at + reach`; -1 if nowhere. */
function placeOf(token, text, at, reach) {
  for (let place = at; place <= at + reach; place++) if (text.startsWith(token, place)) return place;
  return -1;
}

/** Tokens by origin: [{draft, drafter, count}], the target first, then the drafts by number. */
export function countsOf(steps) {
  const counts = new Map([[0, {draft: 0, drafter: "target", count: 0}]]);
  for (const step of steps) {
    const draft = winner(step), own = step.tokens.length - step.num_accepted;
    counts.get(0).count += own;
    if (!draft) continue;
    if (!counts.has(draft)) counts.set(draft, {draft, drafter: drafterOf(step, draft), count: 0});
    counts.get(draft).count += step.num_accepted;
  }
  return [...counts.values()].sort((one, other) => one.draft - other.draft);
}

/** What drew a draft or found it in a text, in words. */
export const drafterOf = (step, draft) => (step.drafters?.[draft - 1] ?? "model").replaceAll("_", " ");
