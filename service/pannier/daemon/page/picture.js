// The picture of a save: a line per rank over time, in the colours of the phases that it passed. It is as
// high for a thousand ranks as for some hundreds: lines overlap then, and the first ones, the slowest, are on top.

const AXIS = 18, MOST_HIGH = 18, HIGH = 400;
// When a rank entered a phase, by the field that has it.
const TIMES = { PLANNED: "planned_s", STREAMING: "staged_s", INGESTED: "ingested_s", DURABLE: "durable_s" };

class Picture {
  // `point(rank)` is called with the number of the rank under mouse or cursor, or null; `pin(rank)` with the one that is clicked.
  constructor(canvas, { describe, point, pin }) {
    Object.assign(this, { canvas, describe, point, pin, ranks: [], at: null, pinned: null, span: 1 });
    canvas.addEventListener("mousemove", event => this.move(this.under(event)));
    canvas.addEventListener("mouseleave", () => this.move(null));
    canvas.addEventListener("click", event => { const rank = this.under(event); if (rank !== null) pin(rank); });
    canvas.addEventListener("focus", () => { if (this.at === null && canvas.matches(":focus-visible")) this.step(0); });
    canvas.addEventListener("blur", () => this.move(null));
    canvas.addEventListener("keydown", event => this.key(event));
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  // `ranks` in the order of the lines; `failed(rank)`: it is why the save failed; `span`: seconds.
  show(ranks, failed, span) {
    Object.assign(this, { ranks, failed, span });
    this.draw();
  }

  get high() {
    const count = Math.max(1, this.ranks.length);
    return count > HIGH ? HIGH / count : Math.min(MOST_HIGH, Math.floor(HIGH / count));
  }

  index(number) { return this.ranks.findIndex(rank => rank.rank === number); }

  under(event) {
    const rank = this.ranks[Math.floor((event.offsetY - AXIS) / this.high)];
    return rank && event.offsetY >= AXIS ? rank.rank : null;
  }

  move(number) {
    this.at = number;
    this.point(number);
    this.draw();
  }

  key(event) {
    const steps = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
    if (event.key in steps) this.step(steps[event.key]);
    else if ((event.key === "Enter" || event.key === " ") && this.at !== null) this.pin(this.at);
    else return;
    event.preventDefault();
  }

  step(by) {
    if (!this.ranks.length) return;
    const from = this.index(this.at), last = this.ranks.length - 1;
    const to = from < 0 ? 0 : Math.max(0, Math.min(last, from + by));
    this.move(this.ranks[to].rank);
  }

  // [phase, from, to] of each phase of a rank; a phase without a time begins with the last known one. Red is what
  // failed the save: a rank that was refused because of another stays in the colour that it had.
  segments(rank) {
    const parts = [];
    let from = 0, phase = "before";
    for (const [next, field] of Object.entries(TIMES)) {
      if (!rank[field]) continue;
      parts.push([phase, from, rank[field]]);
      [phase, from] = [next, rank[field]];
    }
    if (this.failed(rank)) phase = "FAILED";
    else if (phaseOf(rank) !== "FAILED") phase = phaseOf(rank);
    return [...parts, [phase, from, this.span]];
  }

  draw() {
    const { canvas, high, span } = this, width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
    this.announce();
    if (!width) return;
    const tall = AXIS + this.ranks.length * high;
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(tall * ratio);
    canvas.style.height = tall + "px";
    const pen = canvas.getContext("2d"), gap = high > 3 ? 1 : 0, x = s => s / span * width;
    pen.scale(ratio, ratio);
    const colours = Object.fromEntries([...PHASES, "before", "ink", "dim"].map(name => [name, colour(name)]));
    for (let index = this.ranks.length - 1; index >= 0; index--) {
      for (const [phase, from, to] of this.segments(this.ranks[index])) {
        if (to <= from) continue;
        pen.fillStyle = colours[phase];
        pen.fillRect(x(from), Math.floor(AXIS + index * high), Math.max(1, x(to) - x(from)), Math.max(1, high - gap));
      }
    }
    pen.fillStyle = colours.dim;
    this.drawAxis(pen, width, x);
    for (const number of [this.pinned, this.at]) {
      const index = this.index(number);
      if (index < 0) continue;
      pen.strokeStyle = colours.ink; pen.lineWidth = 2;
      pen.strokeRect(1, Math.max(1, AXIS + index * high - 1), width - 2, Math.max(4, high + 2 - gap));
    }
  }

  drawAxis(pen, width, x) {
    const most = width < 480 ? 3 : 6, power = 10 ** Math.floor(Math.log10(this.span / most));
    const step = [1, 2, 5, 10].map(times => times * power).find(each => this.span / each <= most);
    pen.font = "11px system-ui, sans-serif";
    for (let tick = 0; tick * step <= this.span; tick++) {
      const text = `${Number((tick * step).toPrecision(3))} s`, left = x(tick * step);
      pen.fillRect(left, AXIS - 4, 1, 3);
      if (left + pen.measureText(text).width <= width) pen.fillText(text, left, 11);
    }
  }

  // For those who don't see it: the place of the cursor among the ranks, and what is there.
  announce() {
    const index = this.index(this.at), attributes = { valuemin: 1, valuemax: Math.max(1, this.ranks.length), valuenow: Math.max(0, index) + 1 };
    attributes.valuetext = index < 0 ? "no rank is chosen" : this.describe(this.ranks[index]);
    for (const [name, value] of Object.entries(attributes)) this.canvas.setAttribute("aria-" + name, value);
  }
}
