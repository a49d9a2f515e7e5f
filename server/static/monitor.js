// What the server does now: its model, figures of the last three minutes, and the requests that run.

import {drawChart} from "./charts.js";
import {byId, counted, element, shown} from "./dom.js";
import {state} from "./server.js";
import {showDefaults} from "./settings.js";

const SPAN_S = 180, NAME = "polydraft-totals";
const TOTALS = ["tokens", "passes"];
let seen = readSeen(), model = "", speculation = "";

export const modelName = () => model;
export const serverSpeculation = () => speculation;

/** Ask for the state now, and every second from then on; onError(error) for each failure, onState() for each success. */
export async function watch(onState, onError) {
  await look(onState, onError);
  setTimeout(() => watch(onState, onError), document.hidden ? 5000 : 1000);
}

export async function look(onState, onError) {
  try {
    take(await state());
    onState();
  } catch (error) {
    byId("status").textContent = error.message;
    byId("status").className = "bad";
    onError(error);
  }
}

function take(news) {
  model = news.model;
  byId("model").textContent = model;
  byId("status").textContent = news.status;
  byId("status").className = news.status === "ready" ? "good" : "";
  if (news.about) showAbout(news.about);
  byId("tile-requests").textContent = `${news.num_running} + ${news.num_waiting}`;
  byId("tile-cache").textContent = `K/V cache: ${shown(100 * news.kv_cache_usage, 0, " %")} in use`;
  remember({at: news.time_s, ...news.totals, ...news.timing});
  showFigures();
  showRequests(news);
}

function showAbout(about) {
  showDefaults(about.sampling);
  speculation = about.speculation;
  byId("about").replaceChildren(...[
    ["speculation", about.speculation], ["dtype", `${about.dtype} on ${about.device}`],
    ["context", counted(about.max_model_len, "token")], ["version", about.version],
  ].map(([name, value]) => element("div", "", null, element("dt", "", name), element("dd", "", value))));
}

/** Add the totals; those of another run of the server are forgotten. */
function remember(now) {
  const last = seen.at(-1);
  if (last && (now.at <= last.at || TOTALS.some(name => !(now[name] >= last[name])))) seen = [];
  seen.push(now);
  while (seen[0].at < now.at - SPAN_S) seen.shift();
  try {
    sessionStorage.setItem(NAME, JSON.stringify(seen));
  } catch {
    // The charts begin again after a reload.
  }
}

function readSeen() {
  try {
    const read = JSON.parse(sessionStorage.getItem(NAME) ?? "[]");
    return Array.isArray(read) ? read.slice(-2 * SPAN_S) : [];
  } catch {
    return [];
  }
}

/** Rates between two totals; null if nothing was counted. */
function between(before, after) {
  const grown = name => after[name] - before[name], ratio = (a, b) => b > 0 ? a / b : null;
  return {
    at: after.at, rate: ratio(grown("tokens"), after.at - before.at), speedup: speedupOf(grown),
    length: ratio(grown("tokens"), grown("passes")),
    timed: grown("num_tokens"), passes: grown("passes"), tokens: grown("tokens"), resting: grown("resting"),
  };
}

/** The speedup of timed passes, as `Timing.speedup` of the server defines it; null if there were none. */
export function speedupOf(of) {
  if (!(of("wall_s") > 0 && of("usual_s") > 0)) return null;
  const factor = Math.min(of("usual_tokens_s") / of("usual_s"), of("num_tokens") / of("num_passes"));
  return (factor * of("plain_s") + of("prompt_s")) / of("wall_s");
}

function showFigures() {
  const points = seen.slice(1).map((totals, i) => between(seen[i], totals));
  const mean = between(seen[0], seen.at(-1));
  const busy = points.filter(point => point.tokens > 0).slice(-3); // of the last answer if none runs now
  byId("tile-rate").textContent = shown(busy.length ? busy.reduce((sum, point) => sum + point.rate, 0) / busy.length : null, 0);
  byId("count-rate").textContent = `${counted(mean.tokens, "token")} in 3 minutes`;
  byId("tile-speedup").textContent = shown(mean.speedup, 2, "×");
  const rests = mean.resting > mean.passes / 2 ? "; mostly plain, which is as fast at this load" : "";
  byId("count-speedup").textContent = mean.timed ? `mean of ${counted(mean.timed, "token")}${rests}` : "no timed tokens yet";
  byId("tile-length").textContent = shown(mean.length);
  byId("count-length").textContent = mean.passes ? `mean of ${counted(mean.passes, "pass", "passes")}` : "no passes yet";
  byId("figures").hidden = !(mean.tokens > 0);
  byId("no-figures").hidden = mean.tokens > 0;
  if (!(mean.tokens > 0)) return;
  drawChart(byId("chart-rate"), points, [["rate", "line-1"]], SPAN_S);
  drawChart(byId("chart-spec"), points, [["speedup", "line-1"], ["length", "line-2"]], SPAN_S);
}

function showRequests(news) {
  const rows = news.requests.map(one => element("tr", "", null, ...[
    one.rule + (one.num_choices > 1 ? ` (${one.num_choices} answers)` : ""),
    shown(one.num_prompt_tokens, 0), shown(one.num_tokens, 0), shown(one.age_s, 1, " s"),
    shown(one.ttft_s == null ? null : 1000 * one.ttft_s, 0, " ms"), shown(one.tokens_per_pass), shown(one.speedup, 2, "×"),
  ].map(cell => element("td", "", cell))));
  byId("running").hidden = !rows.length;
  byId("requests").replaceChildren(...rows);
  byId("more").textContent = news.num_requests > news.requests.length ? `the first ${news.requests.length} of ${news.num_requests}` : "";
}
