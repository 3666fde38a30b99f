// Loads: in the list, and one of them. Uses the helpers of page.js.

const loadState = load => word(load.state, "LOAD_STATE_"), loadPhase = rank => word(rank.phase, "LOAD_PHASE_");
const isRunning = load => loadState(load) === "LOADING", isLoad = id => id.startsWith("load-");
const readOf = rank => sum(rank.sources, source => Number(source.bytes));
const sourcesOf = from => from.sources.map(source => `${size(source.bytes)} ${source.source === "bucket" ? "storage" : source.source}`).join(", ");

function showLoads(list, current) {
  const lines = list.loads.map(load => {
    const state = loadState(load), line = button(undefined, load.id);
    line.setAttribute("aria-current", String(load.id === current));
    const [directory, name] = splitPath(load.checkpoint_id);
    line.title = load.checkpoint_id;
    line.append(make("b", name), make("span", state, "state " + state), make("span", `${size(load.bytes_read)}, ${ago(now() - began(load))}`, "dim"), make("span", directory, "dim place"));
    return line;
  });
  $("listed").hidden = !lines.length;
  update($("loads"), ...lines);
}

function showLoad(load) {
  const state = loadState(load), running = isRunning(load), read = Number(load.bytes_read), total = Number(load.bytes_total);
  $("load").hidden = false;
  $("loadPlace").textContent = load.checkpoint_id;
  $("loadState").textContent = state;
  $("loadState").className = "state " + state;
  $("loadTimes").textContent = [load.id, load.job, seconds(load.seconds)].filter(Boolean).join(", ");
  $("loadBar").hidden = !running;
  $("loadBar").value = total ? Math.min(1, read / total) : 0;
  $("loadRate").textContent = running ? `${Math.min(100, Math.floor(100 * read / (total || 1)))} % of ${size(total)} read` : `${size(read)}, ${size(read / Math.max(load.seconds, .001))}/s`;
  const waits = load.waiting_on || {};
  $("loadWaiting").textContent = waits.text ? `waiting for ${waits.text}` : "";
  const events = [["retried request", load.retries], ["hedged request", load.hedges], ["rejected block", load.rejected_blocks]].filter(each => Number(each[1])).map(([name, count]) => several(Number(count), name));
  $("loadSources").textContent = ["from " + (sourcesOf(load) || "nowhere yet"), ...events].join("; ");
  update($("loadFailures"), ...load.failures.map(failure => {
    const made = make("div", undefined, "failure");
    made.append(make("b", failure.rank < 0 ? "load" : `rank ${failure.rank} (${failure.host})`), `: ${failure.message}`);
    return made;
  }));
  // Those that failed, and those that have most to read yet.
  const left = rank => loadPhase(rank) === "FAILED" ? Infinity : loadPhase(rank) === "LOADED" ? -1 : Number(rank.bytes_total) - readOf(rank) || rank.seconds_since_seen;
  const ranks = [...load.ranks].sort((a, b) => left(b) - left(a) || a.rank - b.rank), rows = ranks.slice(0, FOUND);
  $("loadSlowest").textContent = rows.length < ranks.length ? `${rows.length} of ${several(ranks.length, "rank")}, those with most to read first` : several(ranks.length, "rank");
  update($("loadRanks"), ...rows.flatMap(loadRows));
}

function loadRows(rank) {
  const row = make("tr"), phase = loadPhase(rank);
  row.append(make("td", rank.rank), make("td", rank.host, "host"), make("td", phase, word(phase, /^(?!FAILED|LOADED).*/)));
  row.append(make("td", size(readOf(rank)), "number"), make("td", size(rank.bytes_total), "number narrow5"), make("td", sourcesOf(rank), "narrow1"));
  row.append(make("td", rank.retries, "number narrow3"), make("td", rank.hedges, "number narrow3"), make("td", rank.rejected_blocks, "number narrow2"), make("td", ago(rank.seconds_since_seen), "number narrow4"));
  if (!rank.waiting_for) return [row];
  const waits = make("tr", undefined, "problem"), text = make("td", "waits for " + rank.waiting_for);
  text.colSpan = row.children.length - 1;
  waits.append(make("td"), text);
  return [row, waits];
}
