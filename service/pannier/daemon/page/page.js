// Polls the daemon and shows what it answers. What is drawn again at a poll keeps focus, hover and what was opened.

const SHOWN = 8, FOUND = 64, CAUSES = 8, LISTED = 16, POLL_MS = 1000, RATE_S = 5;
const { phases: PHASES, terminal } = JSON.parse(document.body.dataset.words), TERMINAL = new Set(terminal);
const HINTS = {
  SKIPPED: "The rank's last save was still in flight: save less often, or find out why uploads are slow.",
  CLIENT: "The rank's own code raised: its log has the traceback.",
  DISAGREEMENT: "Ranks called save with different arguments: compare what each of them passes.",
  INVALID_PLAN: "The ranks' plans don't make one checkpoint: check the keys and shapes it names.",
  PLAN_CHANGED: "What ranks had staged doesn't fit the other ranks' new plans: the next save is planned again.",
  STORAGE: "Storage refused or didn't answer: run `pannier doctor` on that host.",
  INTEGRITY: "Bytes changed on their way: if it happens again, check that host's memory and disk.",
  DEADLINE: "Check the host it names: the rank is unresponsive or slow, or never called save.",
  LOST: "The rank's process died: see its log. Earlier checkpoints are unchanged.",
  SPOOL: "The spool is full: give the sidecar a larger --spool-budget, or save less often.",
  INTERNAL: "A bug in Pannier: the daemon's log has the traceback.",
  EXISTS: "Another checkpoint is there: save to another id, or with overwrite=True.",
};

const $ = id => document.getElementById(id);
const word = (text, prefix) => String(text || "").replace(prefix, "");
const stateOf = save => word(save.state, "SAVE_STATE_"), phaseOf = rank => word(rank.phase, "RANK_PHASE_"), kindOf = failure => word(failure.kind, "FAILURE_KIND_");
// ABORTED with the cause in a word.
const stateText = save => stateOf(save) + (stateOf(save) === "ABORTED" && save.failures.length ? ": " + kindOf(save.failures[0]).toLowerCase().replaceAll("_", " ") : "");
const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim() || colour("PLANNED");

// Texts.

const seconds = s => s >= 100 ? s.toFixed(0) + " s" : s.toFixed(s < 10 ? 2 : 1) + " s";
function size(value) {
  let count = Number(value);
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (count < 1024) return (unit === "B" ? count.toFixed(0) : count.toFixed(1)) + " " + unit;
    count /= 1024;
  }
  return count.toFixed(1) + " TiB";
}
function duration(s) {
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) if (s >= 2 * length) return Math.round(s / length) + " " + unit;
  return Math.max(0, Math.round(s)) + " s";
}
const ago = s => duration(s) + " ago";
const splitPath = path => [path.slice(0, path.lastIndexOf("/") + 1), path.slice(path.lastIndexOf("/") + 1)];
const several = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
const rankList = ranks => `[${ranks.slice(0, LISTED).join(", ")}]` + (ranks.length > LISTED ? ` and ${ranks.length - LISTED} more` : "");

// Elements.

function make(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}
function button(text, key, name) {
  const made = make("button", text, name);
  made.type = "button"; made.dataset.key = key;
  return made;
}
// Replaces the children that changed; the focused one stays focused.
function update(parent, ...children) {
  const focused = parent.contains(document.activeElement) && document.activeElement.dataset.key;
  while (parent.childNodes.length > children.length) parent.lastChild.remove();
  children.forEach((child, index) => {
    const old = parent.childNodes[index];
    if (!old) parent.append(child);
    else if (!old.isEqualNode(child)) old.replaceWith(child);
  });
  if (focused && !parent.contains(document.activeElement)) for (const each of parent.querySelectorAll("[data-key]")) if (each.dataset.key === focused) each.focus();
}
function onKey(parent, act) {
  parent.addEventListener("click", event => { const found = event.target.closest("button[data-key]"); if (found) act(found.dataset.key); });
}

// What is shown.

let ahead = 0, chosen = decodeURIComponent(location.hash.slice(1)), shown = null, throughput = null, order = [], found = [], samples = [];
const opened = new Set();
const now = () => Date.now() / 1000 + ahead;
const began = what => Date.parse(what.created_at) / 1000;

const bytesOf = rank => Math.max(Number(rank.bytes_staged), Number(rank.bytes_ingested), Number(rank.bytes_durable));
const uploadedOf = rank => Math.max(Number(rank.bytes_uploaded), Number(rank.bytes_durable));
const sum = (ranks, of) => ranks.reduce((total, rank) => total + of(rank), 0);

// The ranks that are why the save failed; a rank that was refused because of another isn't.
function failedRanks(save) {
  const named = save.failures.filter(failure => failure.rank >= 0).map(failure => failure.rank);
  return new Set(named.length ? named : save.ranks.filter(rank => phaseOf(rank) === "FAILED").map(rank => rank.rank));
}

// How far a rank is, as a number that grows: the slowest come first, before them those that failed.
function reached(rank, failed) {
  const phase = phaseOf(rank), total = bytesOf(rank) || 1;
  if (failed.has(rank.rank)) return -2;
  if (phase === "FAILED") return -1;
  if (phase === "DURABLE") return PHASES.indexOf(phase) + .5 - rank.durable_s / 1e7;
  return PHASES.indexOf(phase) + Math.min((Number(rank.bytes_ingested) + uploadedOf(rank)) / 2 / total, .99);
}

function showTiles(list) {
  const under = list.saves.filter(save => !TERMINAL.has(stateOf(save))), failed = list.saves.filter(save => stateOf(save) === "ABORTED");
  const last = list.saves.filter(save => stateOf(save) === "COMMITTED").sort((a, b) => began(b) + b.committed_s - began(a) - a.committed_s)[0];
  const tiles = [["under way", under.length ? several(under.length, "save") : "none", under.length ? splitPath(under[0].checkpoint_id)[1] : ""]];
  tiles.push(["last commit", last ? splitPath(last.checkpoint_id)[1] : "none yet", last ? ago(now() - began(last) - last.committed_s) : ""]);
  tiles.push(["aborted", failed.length ? `${failed.length} of ${list.saves.length}` : "none", failed.length ? `${splitPath(failed[0].checkpoint_id)[1]}, ${ago(now() - began(failed[0]))}` : ""]);
  const running = list.loads.filter(isRunning);
  if (running.length) tiles.push(["loading", several(running.length, "load"), splitPath(running[0].checkpoint_id)[1]]);
  if (throughput) tiles.push(["throughput", size(throughput.rate) + "/s", `${size(throughput.left)} of ${splitPath(shown.checkpoint_id)[1]} left`]);
  if (Number(list.spool_capacity_bytes)) {
    const limited = list.upload_limited ? `, at the limit of ${size(list.upload_limit)}/s` : "";
    tiles.push(["to upload", size(list.bytes_queued), list.oldest_upload_s ? "the oldest for " + seconds(list.oldest_upload_s) + limited : ""]);
    tiles.push(["spool", size(list.spool_bytes), size(list.spool_saves_bytes) + " of saves, " + size(list.spool_free_bytes) + " free"]);
    const copies = list.local_copies;
    if (copies.length) tiles.push(["here for loads", size(sum(copies, copy => Number(copy.bytes))), copies.map(copy => splitPath(copy.checkpoint_id)[1]).join(", ")]);
  }
  update($("tiles"), ...tiles.map(([name, value, more]) => {
    const tile = make("div", undefined, "tile");
    tile.append(make("span", name), make("b", value), make("span", more || ""));
    return tile;
  }));
  const jobs = [...new Set([...list.saves.map(save => save.save.job), ...list.loads.map(load => load.job)])].filter(Boolean);
  const of = jobs.length > 1 ? several(jobs.length, "job") : jobs.length ? `job ${jobs[0]}` : "no job so far";
  $("daemon").textContent = `${list.daemon} on ${list.host}, ${of}: ${list.daemon_state}, pannier ${list.version}`;
  $("training").textContent = list.training_waits.length ? "training waits: " + list.training_waits.map(wait => wait.summary).join("; ") : "";
}

function showSaves(list) {
  const lines = list.saves.map(save => {
    const state = stateOf(save), line = button(undefined, save.id);
    line.setAttribute("aria-current", String(shown !== null && save.id === shown.id));
    const [directory, name] = splitPath(save.checkpoint_id);
    line.title = save.checkpoint_id;
    line.append(make("b", name), make("span", stateText(save), "state " + state), make("span", `${size(save.bytes_total)}, ${ago(now() - began(save))}`, "dim"), make("span", directory, "dim place"));
    return line;
  });
  update($("saves"), ...lines.length ? lines : [make("span", "none so far", "dim")]);
}

function showProgress(save) {
  const total = sum(save.ranks, bytesOf), done = sum(save.ranks, uploadedOf), at = performance.now() / 1000;
  if (!samples.length || samples[0].id !== save.id) samples = [];
  samples.push({ id: save.id, done, at });
  while (samples.length > 2 && samples[1].at <= at - RATE_S) samples.shift();
  const ended = TERMINAL.has(stateOf(save)), rate = samples.length > 1 ? (done - samples[0].done) / (at - samples[0].at) : 0;
  throughput = ended || !total ? null : { rate, left: total - done };
  $("progress").hidden = ended ? !save.durable_s : !total;
  $("bar").hidden = ended;
  if (ended) $("rate").textContent = `${size(save.bytes_total)}, ${size(Number(save.bytes_total) / save.durable_s)}/s until durable`;
  else {
    $("bar").value = total ? done / total : 0;
    const parts = [`${Math.floor(100 * done / (total || 1))} % of ${size(total)} uploaded`];
    if (rate > 0) parts.push(size(rate) + "/s", duration((total - done) / rate) + " left");
    $("rate").textContent = parts.join(", ");
  }
}

// One line for all failures with one cause: their messages differ in numbers and in the host at most.
function causes(failures) {
  const groups = new Map();
  for (const failure of failures) {
    const message = failure.host ? failure.message.replaceAll(failure.host, "#") : failure.message;
    const key = kindOf(failure) + message.replace(/\d+(\.\d+)?/g, "#");
    groups.set(key, [...groups.get(key) || [], failure]);
  }
  return [...groups];
}

function showFailures(save) {
  const groups = causes(save.failures);
  const lines = groups.slice(0, CAUSES).map(([key, failures]) => {
    const [first] = failures, kind = kindOf(first), made = make("div", undefined, "failure"), hosts = Map.groupBy(failures, failure => failure.host);
    const one = first.rank < 0 ? "save" : `rank ${first.rank} (${first.host})`;
    made.append(make("b", failures.length === 1 ? one : `${failures.length} ranks on ${several(hosts.size, "host")}`), `: ${kind}: `);
    const alike = failures.every(failure => failure.message === first.message);
    made.append((failures.length === 1 || alike ? "" : `${one}: `) + first.message, make("div", HINTS[kind] || "", "dim"));
    if (failures.length > 1) {
      const details = make("details"), list = make("ul");
      details.dataset.cause = key; details.open = opened.has(key);
      for (const [host, theirs] of hosts) list.append(make("li", `${host}: ${several(theirs.length, "rank")} ${rankList(theirs.map(failure => failure.rank).sort((a, b) => a - b))}`));
      const summary = make("summary", "by host");
      summary.dataset.key = key;
      details.append(summary, list); made.append(details);
    }
    return made;
  });
  if (groups.length > CAUSES) lines.push(make("div", `and ${several(groups.length - CAUSES, "more cause")}`, "dim"));
  update($("failures"), ...lines);
}

function showSave(save) {
  const state = stateOf(save), times = ["planned", "ingested", "durable", "committed"].filter(name => save[name + "_s"]).map(name => `${name} after ${seconds(save[name + "_s"])}`);
  const failed = failedRanks(save);
  shown = save;
  $("save").hidden = false;
  $("place").textContent = save.checkpoint_id;
  $("state").textContent = stateText(save);
  $("state").className = "state " + state;
  if (save.replicated_ranks || save.ranks.some(rank => rank.replica_host)) times.push(`replicated ${save.replicated_ranks} of ${several(save.ranks.length, "rank")}`);
  $("times").textContent = [save.id, ...times].join(", ");
  const waits = save.waiting_on || {}, left = waits.deadline_s ? `, at most ${Math.round(waits.deadline_s)} s more` : "";
  $("waiting").textContent = waits.text ? `waiting for ${waits.text}${left}` : "";
  const stuck = TERMINAL.has(state) ? [] : save.ranks.filter(rank => rank.last_error && phaseOf(rank) !== "DURABLE");
  const problem = stuck.length ? `last error of ${several(stuck.length, "rank")}: ${stuck[0].last_error}` : "";
  $("note").textContent = [save.note, problem].filter(Boolean).join("; ");
  showProgress(save);
  showFailures(save);
  order = save.ranks.map(rank => [reached(rank, failed), rank]).sort((a, b) => a[0] - b[0] || a[1].rank - b[1].rank).map(each => each[1]);
  showRanks();
}

// Numbers are ranks, other words parts of hosts' names, separated by commas.
function matches(rank, terms) {
  return terms.some(term => /^\d+$/.test(term) ? rank.rank === Number(term) : rank.host.toLowerCase().includes(term));
}

// What depends on the search, too.
function showRanks() {
  const failed = failedRanks(shown), terms = $("find").value.toLowerCase().split(",").map(term => term.trim().replace(/^rank\s+/, "")).filter(Boolean);
  const total = several(order.length, "rank");
  found = terms.length ? order.filter(rank => matches(rank, terms)) : order;
  const counts = Object.entries(Object.groupBy(found, phaseOf)).map(([phase, ranks]) => `${ranks.length} ${phase}`).join(", ");
  $("summary").textContent = !terms.length ? counts : found.length ? `${found.length} of ${total}: ${counts}` : `no rank and no host matches, of ${total}`;
  const rows = found.slice(0, terms.length ? FOUND : SHOWN);
  const count = rows.length < found.length ? `${rows.length} of ${several(found.length, "rank")}` : several(found.length, "rank");
  $("slowest").textContent = `${count}, ${failed.size ? "those that failed" : "the slowest"} first`;
  update($("ranks"), ...rows.flatMap(rank => rankRows(rank, failed.has(rank.rank))));
  const latest = Math.max(shown.committed_s, shown.durable_s, ...shown.ranks.map(lastTime)), state = stateOf(shown);
  // Nothing has the time of an abort: room for its red.
  const span = TERMINAL.has(state) ? latest / (failed.size ? .85 : 1) : Math.max(latest, now() - began(shown));
  picture.show(found, rank => failed.has(rank.rank), Math.max(.05, span));
  showPinned();
}
const lastTime = rank => Math.max(...Object.values(TIMES).map(field => rank[field]));

function rankRows(rank, failed) {
  const row = make("tr"), phase = phaseOf(rank), number = make("td");
  number.append(button(rank.rank, rank.rank, "plain"));
  row.append(number, make("td", rank.host, "host"), make("td", phase, failed ? "FAILED" : word(phase, "FAILED")));
  const narrow = { staged: " narrow5", ingested: " narrow1", uploaded: "", durable: " narrow2" };
  for (const name in narrow) row.append(make("td", size(rank["bytes_" + name]), "number" + narrow[name]));
  row.append(make("td", rank.stalled_s ? seconds(rank.stalled_s) : "", "number narrow3"), make("td", rank.retries, "number narrow3"), make("td", ago(rank.seconds_since_seen), "number narrow4"));
  // The failures have those of a failed save.
  if (!rank.last_error || failed) return [row];
  const problem = make("tr", undefined, "problem"), text = make("td", rank.last_error);
  text.colSpan = row.children.length - 1;
  problem.append(make("td"), text);
  return [row, problem];
}

// One rank, while the mouse or the cursor is on it, and for longer when it is pinned.

const rankOf = number => shown && shown.ranks.find(rank => rank.rank === number);
const describe = rank => `rank ${rank.rank} on ${rank.host}: ${phaseOf(rank)}, ${size(rank.bytes_uploaded)} of ${size(bytesOf(rank))} uploaded, ${rank.transport || "nothing sent yet"}${rank.last_error ? ": " + rank.last_error : ""}`;

function showPinned() {
  const under = rankOf(picture.at), pinned = rankOf(picture.pinned);
  $("under").textContent = under ? describe(under) : "Point at a line or use the arrow keys to see its rank; a click or Enter pins it.";
  $("pinned").hidden = !pinned;
  if (!pinned) return;
  const facts = [["phase", phaseOf(pinned)], ...["staged", "ingested", "uploaded", "durable"].map(name => [name, size(pinned["bytes_" + name])])];
  if (pinned.replica_host) facts.push([`replica on ${pinned.replica_host}`, size(pinned.bytes_replicated)]);
  facts.push(["stall", pinned.stalled_s ? seconds(pinned.stalled_s) : "none yet"], ["retries", pinned.retries], ["last seen", ago(pinned.seconds_since_seen)]);
  for (const [phase, field] of Object.entries(TIMES)) if (pinned[field]) facts.push([`${phase} after`, seconds(pinned[field])]);
  const list = make("dl");
  for (const [name, value, wide] of [...facts, ["transport", pinned.transport || "nothing sent yet", true], ["problem", pinned.last_error || "none", true]]) {
    const fact = make("div", undefined, wide && "wide");
    fact.append(make("dt", name), make("dd", value));
    list.append(fact);
  }
  const close = button("unpin", "unpin", "plain");
  close.id = "unpin";
  update($("pinned"), close, make("b", `rank ${pinned.rank} on ${pinned.host}`), list);
}

function pin(number) {
  picture.pinned = number === picture.pinned ? null : number;
  picture.draw();
  showPinned();
}

const picture = new Picture($("timeline"), { describe, point: showPinned, pin });
update($("legend"), ...PHASES.map(phase => {
  const made = make("span"), box = make("i");
  box.style.background = `var(--${phase}, var(--PLANNED))`;
  made.append(box, phase);
  return made;
}));
onKey($("ranks"), key => pin(Number(key)));
onKey($("pinned"), () => pin(null));
for (const list of ["saves", "loads"]) onKey($(list), key => {
  location.hash = encodeURIComponent(key);
  $("shown").scrollIntoView({ block: "nearest" });
});
$("failures").addEventListener("toggle", event => opened[event.target.open ? "add" : "delete"](event.target.dataset.cause), true);
$("find").addEventListener("input", () => shown && showRanks());
document.addEventListener("keydown", event => { if (event.key === "Escape") pin(null); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => picture.draw());

// Polls.

async function read(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw Object.assign(new Error((await answer.text()).slice(0, 300)), { status: answer.status });
  const date = Date.parse(answer.headers.get("Date"));
  // The daemon's clock counts; its header has whole seconds.
  ahead = date && Math.abs(date - Date.now()) > 2000 ? (date - Date.now()) / 1000 : 0;
  return answer.json();
}

// The chosen save or load, which may be older than the list; without a choice the newest save that is under way, or else load.
async function showChosen(list) {
  const underWay = list.saves.find(save => !TERMINAL.has(stateOf(save))) || list.loads.find(isRunning);
  const id = chosen || (underWay || list.saves[0] || list.loads[0] || {}).id || "", load = isLoad(id);
  let unknown = "";
  try {
    if (load) showLoad((await read("load.json?id=" + encodeURIComponent(id))).load);
    else if (id) showSave((await read("save.json?id=" + encodeURIComponent(id))).save);
  } catch (error) {
    if (error.status !== 404) throw error;
    unknown = error.message;
  }
  if (!id || unknown || load) { shown = throughput = null; $("save").hidden = true; }
  $("load").hidden = Boolean(!load || unknown);
  showLoads(list, id);
  $("unknown").hidden = !unknown;
  $("unknown").textContent = unknown && `${unknown.trim()}. It may be older than what the daemon remembers, or another daemon's.`;
}

let asking = false, again = false, answered = Date.now();
async function refresh() {
  again = asking;
  if (asking) return;
  asking = true;
  try {
    const list = await read("status.json");
    await showChosen(list);
    showTiles(list); showSaves(list);
    answered = Date.now(); $("lost").hidden = true;
  } catch (error) {
    $("lost").hidden = false;
    $("lost").textContent = `The daemon has not responded for ${Math.round((Date.now() - answered) / 1000)} s; this page shows older data: ${error.message}`;
  } finally { asking = false; }
  if (again) await refresh();
}
window.addEventListener("hashchange", () => { chosen = decodeURIComponent(location.hash.slice(1)); refresh(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
(async function poll() { if (!document.hidden) await refresh(); setTimeout(poll, POLL_MS); })();
