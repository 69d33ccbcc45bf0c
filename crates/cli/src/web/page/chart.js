// Charts by hand: SVG that follows the theme, a grid, a legend, and a line under the pointer that says the values.
// Every text is set as text, never as markup.

const NS = 'http://www.w3.org/2000/svg';

export function svg(tag, attributes = {}, ...inner) {
  const element = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...inner);
  return element;
}

export function el(tag, attributes = {}, ...inner) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'class') element.className = value;
    else if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, '');
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...inner.filter(it => it != null));
  return element;
}

export function number(value, digits = 4) {
  if (value == null) return '–';
  if (!Number.isFinite(value)) return 'not finite';
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace('e+', 'e');
  if (size >= 1000) return Math.round(value).toLocaleString('en');
  return String(Number(value.toPrecision(digits)));
}

export function duration(secs) {
  if (secs == null || !Number.isFinite(secs)) return '–';
  if (secs < 1) return `${number(secs * 1000, 3)} ms`;
  if (secs < 60) return `${number(secs, 3)} s`;
  const minutes = Math.round(secs / 60);
  if (minutes < 60) return `${Math.floor(secs / 60)} min ${String(Math.floor(secs % 60)).padStart(2, '0')} s`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, '0')} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor(minutes / 60) % 24} h`;
}

export function bytes(n) {
  if (n == null) return '–';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let at = 0;
  while (n >= 1000 && at < units.length - 1) { n /= 1024; at++; }
  return `${at && n < 100 ? n.toFixed(1) : Math.round(n)} ${units[at]}`;
}

export function ago(time) {
  const secs = Date.now() / 1000 - time;
  if (!time) return '–';
  if (secs < 5) return 'now';
  if (secs < 90) return `${Math.round(secs)} s ago`;
  if (secs < 5400) return `${Math.round(secs / 60)} min ago`;
  if (secs < 129600) return `${Math.round(secs / 3600)} h ago`;
  return `${Math.round(secs / 86400)} d ago`;
}

function ticks(low, high, most, isBinary) {
  const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
  const unit = isBinary ? 2 ** Math.ceil(Math.log2(raw)) : [1, 2, 2.5, 5, 10].find(it => it * power >= raw) * power;
  const all = [];
  for (let at = Math.ceil(low / unit - 1e-9) * unit; at <= high + unit * 1e-6; at += unit) all.push(Math.abs(at) < unit / 1e6 ? 0 : at);
  return all;
}

// The range that curves are drawn in: spikes of a noisy curve are cut off, what it is about is not.
function range(series, isLog) {
  let low = Infinity, high = -Infinity;
  for (const { y, clip } of series) {
    let values = y.filter(it => Number.isFinite(it) && (!isLog || it > 0));
    if (!values.length) continue;
    if (clip && values.length > 40) {
      values = Float64Array.from(values).sort();
      values = [values[Math.floor(values.length * 0.01)], values[Math.floor(values.length * 0.985)]];
    }
    for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  }
  return [low, high];
}

// A chart in an element. Series: { name, tone, x, y, points?, thin?, clip?, dash? }.
export class Chart {
  constructor(box, options = {}) {
    this.box = box;
    this.options = { format: number, height: 220, zero: false, ...options };
    this.series = [];
    this.legend = el('div', { class: 'legend' });
    this.plot = el('div', { class: 'plot' });
    this.tip = el('div', { class: 'tip', hidden: true });
    this.plot.append(this.tip);
    box.append(this.legend, this.plot);
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.plot.addEventListener('pointermove', event => this.hover(event));
    this.plot.addEventListener('pointerleave', () => this.leave());
  }

  set(series, options = {}) {
    Object.assign(this.options, options);
    this.series = series.filter(it => it.y.length);
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth, height = this.series.length ? this.options.height : 48;
    this.svg?.remove();
    this.drawLegend();
    if (!width) return;
    this.svg = svg('svg', { width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': this.options.label || 'chart' });
    this.plot.append(this.svg);
    if (!this.series.length) {
      this.svg.append(svg('text', { x: width / 2, y: height / 2, class: 'none', 'text-anchor': 'middle' }, this.options.none || 'nothing yet'));
      return;
    }
    this.place(width, height);
    this.axes();
    for (const series of this.series) this.curve(series);
    for (const mark of this.options.marks || []) this.mark(mark);
    this.cursor = svg('line', { class: 'cursor', y1: this.top, y2: this.bottom, visibility: 'hidden' });
    this.svg.append(this.cursor);
  }

  drawLegend() {
    const items = this.series.map(({ name, tone, points, thin }) => el('span', { class: `key ${tone}${thin ? ' thin' : ''}` },
      el('i', { class: points ? 'dot' : '' }), name));
    this.legend.replaceChildren(...items);
    this.legend.hidden = this.series.length < 2 && !this.options.legend;
  }

  place(width, height) {
    const isLog = this.options.log;
    let [low, high] = range(this.series, isLog);
    for (const mark of this.options.marks || []) if (mark.inside) { low = Math.min(low, mark.y); high = Math.max(high, mark.y); }
    if (!Number.isFinite(low)) [low, high] = isLog ? [0.1, 1] : [0, 1];
    if (this.options.zero) low = Math.min(0, low);
    if (low === high) [low, high] = isLog ? [low / 2, high * 2] : [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2];
    const scale = isLog ? Math.log10 : it => it;
    const room = (scale(high) - scale(low)) * 0.06;
    const bottom = this.options.zero && low === 0 ? 0 : scale(low) - room, top = scale(high) + room;
    let x0 = Infinity, x1 = -Infinity;
    for (const { x } of this.series) for (const at of [x[0], x[x.length - 1]]) { x0 = Math.min(x0, at); x1 = Math.max(x1, at); }
    if (x0 === x1) x1 = x0 + 1;
    Object.assign(this, { left: 54, right: width - 10, top: 8, bottom: height - 24, x0, x1, yLow: bottom, yHigh: top, scale });
    this.px = at => this.left + (at - x0) / (x1 - x0) * (this.right - this.left);
    this.py = at => {
      const y = this.bottom - (scale(at) - bottom) / (top - bottom) * (this.bottom - this.top);
      return Math.max(this.top - 2, Math.min(this.bottom + 2, y));
    };
  }

  axes() {
    const grid = svg('g', { class: 'grid' });
    const isLog = this.options.log;
    let rows = isLog ? [] : ticks(this.yLow, this.yHigh, Math.max(2, (this.bottom - this.top) / 44), this.options.format === bytes);
    if (isLog) {
      for (let power = Math.floor(this.yLow); power <= this.yHigh; power++) for (const part of [1, 2, 5]) rows.push(part * 10 ** power);
      rows = rows.filter(it => Math.log10(it) >= this.yLow && Math.log10(it) <= this.yHigh);
    }
    for (const at of rows) {
      const y = this.py(at);
      grid.append(svg('line', { x1: this.left, x2: this.right, y1: y, y2: y }),
        svg('text', { x: this.left - 7, y: y + 4, 'text-anchor': 'end' }, this.options.format(at)));
    }
    for (const at of ticks(this.x0, this.x1, Math.max(2, (this.right - this.left) / 90))) {
      const x = this.px(at);
      grid.append(svg('text', { x, y: this.bottom + 17, 'text-anchor': x > this.right - 14 ? 'end' : 'middle' }, number(at)));
    }
    this.svg.append(grid);
  }

  curve({ tone, x, y, points, thin, dash }) {
    if (points) {
      const group = svg('g', { class: `dots ${tone}` });
      for (let at = 0; at < x.length; at++) if (Number.isFinite(y[at])) group.append(svg('circle', { cx: this.px(x[at]).toFixed(1), cy: this.py(y[at]).toFixed(1), r: 3.2 }));
      this.svg.append(group);
    }
    let path = '', isPen = false;
    for (let at = 0; at < x.length; at++) {
      const isDrawn = Number.isFinite(y[at]) && (!this.options.log || y[at] > 0);
      if (isDrawn) path += `${isPen ? 'L' : 'M'}${this.px(x[at]).toFixed(1)} ${this.py(y[at]).toFixed(1)}`;
      isPen = isDrawn;
    }
    if (path) this.svg.append(svg('path', { d: path, class: `curve ${tone}${thin ? ' thin' : ''}${dash || points ? ' dash' : ''}` }));
  }

  mark({ y, text, tone }) {
    const at = this.py(y);
    if (at <= this.top || at >= this.bottom) return;
    this.svg.append(svg('line', { x1: this.left, x2: this.right, y1: at, y2: at, class: `mark ${tone || ''}` }),
      svg('text', { x: this.right - 2, y: at - 4, 'text-anchor': 'end', class: 'marktext' }, text));
  }

  hover(event) {
    if (!this.series.length || !this.px) return;
    const box = this.plot.getBoundingClientRect();
    const at = this.x0 + (event.clientX - box.left - this.left) / (this.right - this.left) * (this.x1 - this.x0);
    if (at < this.x0 || at > this.x1) return this.leave();
    const rows = [], nearest = [];
    for (const { name, tone, x, y } of this.series) {
      let low = 0, high = x.length - 1;
      while (high - low > 1) { const middle = (low + high) >> 1; if (x[middle] < at) low = middle; else high = middle; }
      const best = Math.abs(x[low] - at) <= Math.abs(x[high] - at) ? low : high;
      nearest.push(x[best]);
      rows.push(el('div', { class: `key ${tone}` }, el('i'), `${name} `, el('b', {}, y[best] == null ? 'not finite' : this.options.format(y[best]))));
    }
    const x = nearest.reduce((a, b) => Math.abs(b - at) < Math.abs(a - at) ? b : a);
    this.tip.replaceChildren(el('div', { class: 'at' }, `${this.options.xName || 'step'} ${number(x)}`), ...rows);
    this.tip.hidden = false;
    const px = this.px(x), isRight = px > box.width * 0.6;
    this.tip.style.left = `${isRight ? px - this.tip.offsetWidth - 12 : px + 12}px`;
    this.cursor.setAttribute('x1', px);
    this.cursor.setAttribute('x2', px);
    this.cursor.setAttribute('visibility', 'visible');
  }

  leave() {
    this.tip.hidden = true;
    this.cursor?.setAttribute('visibility', 'hidden');
  }
}
