"use strict";
// Draws what /events tells. Names come from others: they only ever become text, never markup.

const MAX_STEPS = 2000;
const SVG = "http://www.w3.org/2000/svg";
const jobs = new Map(); // job id -> {view, steps, keys, gain, decisions, hover, parts}
const by_id = (id) => document.getElementById(id);

function el(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  if (options.class) made.className = options.class;
  if (options.text !== undefined) made.textContent = options.text;
  if (options.title) made.title = options.title;
  made.append(...children);
  return made;
}

function svg(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const count = (n) => Math.round(n).toLocaleString("en");
const percent = (n, digits = 1) => `${n.toFixed(digits)}\u00a0%`;

function time(us) {
  if (us >= 1e6) return `${(us / 1e6).toFixed(2)} s`;
  return us >= 1000 ? `${(us / 1000).toFixed(us >= 1e5 ? 0 : 2)} ms` : `${us.toFixed(0)} µs`;
}

function ago(s) {
  if (s < 120) return `${s.toFixed(0)} s`;
  return s < 7200 ? `${(s / 60).toFixed(0)} min` : `${(s / 3600).toFixed(1)} h`;
}

const signed = (n, digits = 1) => `${n < 0 ? "−" : ""}${Math.abs(n).toFixed(digits)}`;

function median(values) {
  const sorted = values.slice().sort((a, b) => a - b);
  return sorted[sorted.length >> 1];
}

// -- what is told ---------------------------------------------------------------------------

function take(snapshot, is_whole) {
  const problem = snapshot.problem || "";
  taken_at = new Date();
  chip(by_id("link"), problem ? "no daemon" : "live", problem ? "bad" : "good");
  by_id("daemon").textContent = problem ? "" : [
    snapshot.daemon, `up ${ago(snapshot.uptime_s || 0)}`, `${((snapshot.resident_bytes || 0) / 2 ** 20).toFixed(0)} MiB`,
    ...(snapshot.n_errors ? [`${count(snapshot.n_errors)} failures of its own`] : []),
    ...(snapshot.n_refused ? [`${count(snapshot.n_refused)} bad messages and records refused`] : []),
    snapshot.options || "", `store ${snapshot.store_path}`,
  ].filter(Boolean).join(" · ");
  notices(by_id("notices"), problem ? [] : snapshot.notices || []);
  const views = snapshot.jobs || [];
  if (is_whole) forget(() => true);
  const there = new Set(views.map((view) => view.job_id));
  forget((id) => !there.has(id));
  for (const view of views) show(view, snapshot);
  trouble(problem ? "No answer from the daemon" : "", problem);
  by_id("empty").hidden = problem || views.length > 0;
  by_id("next").replaceChildren(...(snapshot.next_steps || []).map(([command, purpose]) =>
    el("li", {}, el("code", { text: command }), ` ${purpose}`)));
  document.title = views.length ? `${time(views[0].step_us)} · zerotune` : "zerotune";
}

function trouble(what, why) {
  by_id("trouble").replaceChildren(...(what ? [el("strong", { text: what }), el("span", { text: why })] : []));
}

function forget(is_gone) {
  for (const [id, job] of jobs) {
    if (!is_gone(id)) continue;
    job.parts.root.remove();
    jobs.delete(id);
  }
}

function show(view, snapshot) {
  let job = jobs.get(view.job_id);
  if (!job) {
    job = { steps: [], decisions: null, hover: null, parts: parts() };
    jobs.set(view.job_id, job);
    by_id("jobs").append(job.parts.root);
    hovering(job);
  }
  const last = job.steps.length ? job.steps[job.steps.length - 1][0] : -1;
  for (const step of view.steps || []) if (step[0] > last) job.steps.push(step);
  if (job.steps.length > MAX_STEPS) job.steps.splice(0, job.steps.length - MAX_STEPS);
  job.view = view;
  head(job);
  cards(job, snapshot);
  chart(job);
  lateness(job);
  if (view.keys) keys(job, view.keys);
  if (view.decisions) decisions(job, view.decisions);
}

// -- parts of a job -------------------------------------------------------------------------

function parts() {
  const made = {
    root: el("section", { class: "job" }), head: el("div", { class: "head" }),
    notices: el("ul", { class: "notices" }), cards: el("div", { class: "cards" }),
    chart: el("div", { class: "chart" }), legend: el("div", { class: "legend" }), late: el("div"),
    keys: el("ul", { class: "rows scroll" }, el("li", { class: "muted", text: "nothing was measured yet" })),
    trials: el("ul", { class: "rows" }, el("li", { class: "muted", text: "not known yet" })),
    decisions: el("div", { class: "scroll" }, el("p", { class: "muted", text: "none yet" })),
    no_steps: el("p", { class: "muted", text: "no step has ended yet" }),
  };
  const panel = (title, kind, ...children) =>
    el("div", { class: `panel ${kind}` }, el("h3", { text: title }), ...children);
  made.panels = el("div", { class: "panels" },
    panel("Steps", "wide", made.no_steps, made.chart, made.legend),
    panel("Keys by share of a step", "", made.keys),
    el("div", { class: "stack" }, panel("Being tried now", "", made.trials), panel("Who is late", "", made.late)),
    panel("Decisions", "wide", made.decisions));
  made.root.append(made.head, made.notices, made.cards, made.panels);
  return made;
}

function chip(at, words, kind) {
  at.className = `chip ${kind}`;
  at.textContent = words;
}

function notices(at, list) {
  at.hidden = !list.length;
  at.replaceChildren(...list.map((one) => el("li", { class: one.is_bad ? "bad" : "", text: one.text })));
}

function head(job) {
  const { view, parts: at } = job;
  const health = el("span");
  chip(health, view.health, view.is_well ? "good" : "bad");
  const facts = [
    `${view.n_ranks_seen} of ${view.n_ranks} ranks`, view.workload, `fabric ${view.fabric_id}`,
    `step ${count(view.step)}`, `epoch ${count(view.epoch)}`, `${count(view.observations_per_s)} observations/s`,
    ...(view.n_dropped ? [`${count(view.n_dropped)} dropped`] : []),
  ].join(" · ");
  at.head.replaceChildren(el("h2", { text: view.title }), health, el("p", { class: "muted name", text: facts }));
  notices(at.notices, view.notices || []);
}

function card(title, value, below, ...more) {
  return el("div", { class: "card", title: title }, title, el("b", { text: value }), below, ...more);
}

function meter(...shares) {
  return el("div", { class: "meter" }, ...shares.map(([share, kind]) => {
    const bar = el("i", { class: kind });
    bar.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
    return bar;
  }));
}

function gain(found) {
  if (!found) return card("Saved per step", "not known yet", "no key has been measured");
  if (found.saved_percent === null) {
    return card("Saved per step", found.kind === "no_plan" ? "nothing yet" : "not known yet", found.why);
  }
  const interval = `95 %: ${signed(found.low_percent)} to ${signed(found.high_percent)}\u00a0%`;
  if (found.kind === "within_noise") return card("Saved per step", "nothing beyond noise", interval);
  return card(found.saved_us > 0 ? "Saved per step" : "Lost per step", percent(Math.abs(found.saved_percent)),
    `${interval}; ${time(Math.abs(found.saved_us))} against NCCL's own choice`);
}

function cards(job, snapshot) {
  const { view } = job;
  const known = view.exposed_us !== null && view.exposed_us !== undefined;
  const share = known && view.step_us ? view.exposed_us / view.step_us : 0;
  const budget = snapshot.budget_percent, spent = view.spent_percent;
  job.gain = view.gain || job.gain;
  job.parts.cards.replaceChildren(
    gain(job.gain),
    card("Step time", view.step_us ? time(view.step_us) : "–", "median of the latest"),
    card("Exposed communication", known ? time(view.exposed_us) : view.exposure,
      known ? `${percent(100 * share)} of a step` : "of communication; its time is not measured", ...(known ? [meter([share, "exposed"])] : [])),
    budget ? card("Budget for trials", `${percent(Math.max(0, budget - spent), 2)} left`,
      `of step time; ${percent(spent, 2)} of ${budget}\u00a0% is spent`, meter([spent / budget, ""]))
      : card("Spent on trials", percent(spent, 2), "of step time; no budget is known"));
}

// -- the chart of steps ---------------------------------------------------------------------

function usual(values) {
  const half = Math.min(7, values.length >> 3);
  return values.map((_, at) => median(values.slice(Math.max(0, at - half), at + half + 1)));
}

function ticks(top, n) {
  const rough = top / n, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  return Array.from({ length: Math.floor(top / step) + 1 }, (_, at) => at * step);
}

const LEFT = 58, RIGHT = 10, TOP = 10, BOTTOM = 24;

function scales(job, width, height) {
  const { steps } = job;
  const first = steps[0][0], last = steps[steps.length - 1][0];
  const sorted = steps.map((one) => one[1]).sort((a, b) => a - b);
  const top = 1.15 * sorted[Math.floor(0.99 * (sorted.length - 1))] || 1;
  const x = (step) => LEFT + (width - LEFT - RIGHT) * (last === first ? 0.5 : (step - first) / (last - first));
  const y = (us) => TOP + (height - TOP - BOTTOM) * (1 - Math.min(us, top) / top);
  return { first, last, top, x, y };
}

function chart(job) {
  const { steps, parts: at } = job;
  at.no_steps.hidden = steps.length > 1;
  if (steps.length < 2) return;
  const width = at.chart.clientWidth || 900, height = 208;
  const { first, last, top, x, y } = scales(job, width, height);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "step time over steps" });
  for (const value of ticks(top, 4)) {
    picture.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
    picture.append(svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, value ? time(value) : "0"));
  }
  for (const value of ticks(last - first || 1, 6)) {
    const step = Math.round(first + value);
    picture.append(svg("text", { x: x(step), y: height - 6, "text-anchor": step === first ? "start" : "middle" }, count(step)));
  }
  for (let i = 1; i < steps.length; i++) {
    if (steps[i][3] === steps[i - 1][3]) continue;
    const there = x(steps[i][0]); // short: there may be hundreds
    picture.append(svg("line", { class: "plan", x1: there, x2: there, y1: height - BOTTOM - 7, y2: height - BOTTOM }));
  }
  const line = (kind, values) => picture.append(svg("polyline", {
    class: kind, points: values.map((us, i) => `${x(steps[i][0]).toFixed(1)},${y(us).toFixed(1)}`).join(" "),
  }));
  const all = steps.map((one) => one[1]);
  line("every", all);
  const has_exposed = steps.every((one) => one[2] !== null);
  if (has_exposed) line("exposed", usual(steps.map((one) => one[2])));
  line("usual", usual(all));
  at.legend.replaceChildren(
    el("span", {}, el("i"), "step time, thin: every step"),
    ...(has_exposed ? [el("span", {}, el("i", { class: "exposed" }), "exposed communication")] : []),
    el("span", {}, el("i", { class: "plan" }), "another plan, or NCCL's own to compare with"));
  at.chart.replaceChildren(picture);
  cross(job, picture, width, height);
}

function hovering(job) {
  const at = job.parts.chart;
  at.addEventListener("pointermove", (event) => {
    job.hover = event.clientX - at.getBoundingClientRect().left;
    chart(job);
  });
  at.addEventListener("pointerleave", () => { job.hover = null; chart(job); });
}

function cross(job, picture, width, height) {
  if (job.hover === null) return;
  const { x } = scales(job, width, height);
  const near = job.steps.reduce((a, b) => Math.abs(x(b[0]) - job.hover) < Math.abs(x(a[0]) - job.hover) ? b : a);
  const there = x(near[0]);
  picture.append(svg("line", { class: "cross", x1: there, x2: there, y1: TOP, y2: height - BOTTOM }));
  const exposed = near[2] === null ? "" : ` · exposed ${time(near[2])}`;
  const tip = el("div", { class: "tip", text: `step ${count(near[0])} · ${time(near[1])}${exposed} · epoch ${near[3]}` });
  job.parts.chart.append(tip);
  const wanted = there > width / 2 ? there - tip.offsetWidth - 8 : there + 8;
  tip.style.left = `${Math.max(0, Math.min(wanted, width - tip.offsetWidth))}px`;
}

// -- keys, decisions, lateness --------------------------------------------------------------

function keys(job, list) {
  const items = list.map((one) => {
    const share = one.step_percent, saved = one.saved_percent || 0;
    const effect = Math.abs(saved) < 0.05 ? "" : `${saved > 0 ? "saves" : "costs"} ${percent(Math.abs(saved))} of a step`;
    return el("li", {},
      el("span", { class: "pair" }, el("span", { text: one.where }), el("b", { text: share === null ? "–" : percent(share) })),
      meter([(share || 0) / 100, ""]),
      el("span", { class: "pair" }, el("span", { class: "muted", text: one.setting }),
        el("span", { class: saved > 0 ? "good" : "loss", text: effect })));
  });
  job.parts.keys.replaceChildren(...items);
  const tried = list.filter((one) => one.on_trial).map((one) => el("li", {},
    el("strong", { text: one.on_trial }), ` in place of ${one.setting}${one.is_trial_to_come ? ", from the next plan on" : ""}`,
    el("div", { class: "muted", text: one.where })));
  job.parts.trials.replaceChildren(...(tried.length ? tried : [el("li", { class: "muted", text: "No key has a setting on trial." })]));
}

function decisions(job, list) {
  if (!list.length) return;
  const key = (one) => JSON.stringify(one);
  const before = job.decisions && new Set(job.decisions.map(key));
  job.decisions = list;
  job.parts.decisions.replaceChildren(el("ol", { class: "decisions" }, ...list.map((one) => {
    const when = one.step === null || one.step === undefined ? "" : `step ${count(one.step)} · epoch ${one.epoch}`;
    const known = ["explore", "promote", "keep", "rollback", "prior", "provisional"].includes(one.kind) ? one.kind : "";
    return el("li", { class: before && !before.has(key(one)) ? "new" : "" },
      el("span", { class: `kind ${known}`, text: one.kind }), el("strong", { text: one.setting }),
      el("span", { class: "muted", text: one.where ? ` for ${one.where} · ${when}` : ` ${when}` }), el("br"), one.reason);
  })));
}

function lateness(job) {
  const { view, parts: at } = job;
  const wait = view.wait_us || 0, transfer = view.transfer_us || 0, whole = wait + transfer;
  const list = view.stragglers || [];
  const most = Math.max(...list.map((one) => one.late_us), 1);
  const waiting = whole ? el("div", {},
    `A step's collectives take ${time(whole)}, of which ${time(wait)} (${percent(100 * wait / whole, 0)}) are waiting for the last rank.`,
    meter([wait / whole, "exposed"], [transfer / whole, ""])) : el("p", { class: "muted", text: "not known yet" });
  const items = list.map((one) => el("li", { class: "name" },
    `${one.who}: ${time(one.late_us)} late in ${percent(100 * one.share, 0)} of steps`, meter([one.late_us / most, "exposed"])));
  const nobody = whole && !list.length ? [el("li", { class: "muted", text: "Nobody is persistently late." })] : [];
  at.late.replaceChildren(el("ul", { class: "rows" }, el("li", {}, waiting), ...items, ...nobody));
}

// -- the line -------------------------------------------------------------------------------

// The address that is printed has a token behind its #. It is kept for this tab and this port alone.
const KEPT = "zerotune-token", AGAIN_MS = 2000;
let taken_at = null; // when the newest snapshot came
if (location.hash.length > 1) {
  sessionStorage.setItem(KEPT, location.hash.slice(1));
  history.replaceState(null, "", location.pathname);
}

async function listen() { // until the line breaks
  const answer = await fetch("events", { headers: { authorization: `Bearer ${sessionStorage.getItem(KEPT)}` } });
  if (!answer.ok) throw new Error((await answer.text()).trim());
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new TypeError("disconnected");
    const events = (unread + value).split("\n\n");
    unread = events.pop();
    for (const event of events) {
      const [name, data] = event.split("\n").map((line) => line.slice(line.indexOf(": ") + 2));
      take(JSON.parse(data), name === "whole");
    }
  }
}

function cut(error) {
  const since = taken_at ? ` What is below was so at ${taken_at.toLocaleTimeString()}.` : "";
  const why = error instanceof TypeError ? "It has ended, or the line to it is cut; this page asks on." : `${error.message}.`;
  chip(by_id("link"), "disconnected", "bad");
  trouble("`zerotune status --web` does not answer", why + since);
}

async function listen_on() {
  for (;;) {
    await listen().catch(cut);
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

listen_on();
addEventListener("hashchange", () => location.reload());
addEventListener("resize", () => jobs.forEach(chart));
