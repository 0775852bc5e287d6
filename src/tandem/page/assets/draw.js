'use strict';
// What every chart needs: SVG elements, scales, ticks, numbers as text, legends and read-outs.

const SVG = 'http://www.w3.org/2000/svg';
const PLOT_HEIGHT = 216;
const charts = [];  // those on the page, so that a step under the pointer is marked on all of them

function svg(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

// Text is only ever set as text, never as markup.
function html(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

function colourClass(colour) {
  return typeof colour === 'number' ? `c${colour % 8}` : `${String(colour).replace(/[^a-z]/g, '')}-series`;
}

// Round numbers that divide a range, as close to `count` of them as there can be: 0 to 7 -> 0, 2, 4, 6.
function ticksBetween(low, high, count) {
  const power = 10 ** Math.floor(Math.log10((high - low) / Math.max(count, 1)));
  const number = (size) => Math.floor(high / size + 1e-9) - Math.ceil(low / size - 1e-9) + 1;
  const step = [1, 2, 5, 10].map((times) => times * power).reduce((best, size) => (Math.abs(number(size) - count) < Math.abs(number(best) - count) ? size : best));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && found.length < 50; i++) found.push(i * step);
  return found;
}

function formatted(value, kind, step) {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–';
  if (kind === 'percent') {
    if (step === undefined && value > 1 - 1e-9) return '100 %';
    const digits = step === undefined ? 1 : Math.max(0, -Math.floor(Math.log10(step * 100) + 1e-9));
    return `${(100 * value).toFixed(Math.min(digits, 3))} %`.replace('-', '−');
  }
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (kind === 'step') return Math.round(value).toLocaleString('en');
  if (step === undefined && size >= 100000) return Math.round(value).toLocaleString('en').replace('-', '−');
  if (size >= 1e6) return `${trimmed(value / 1e6, step && step / 1e6)}M`;
  if (size >= 10000) return `${trimmed(value / 1e3, step && step / 1e3)}k`;
  if (size < 1e-3) {
    const digits = step === undefined ? 3 : Math.max(0, Math.floor(Math.log10(size) + 1e-9) - Math.floor(Math.log10(step) + 1e-9));
    return value.toExponential(Math.min(digits, 5)).replace(/-/g, '−');
  }
  return trimmed(value, step);
}

function trimmed(value, step) {
  const digits = step ? Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)) : Math.max(0, 4 - Math.ceil(Math.log10(Math.abs(value) + 1e-12)));
  return value.toLocaleString('en', { minimumFractionDigits: Math.min(digits, 6), maximumFractionDigits: Math.min(digits, 6) }).replace('-', '−');
}

function scale(domain, range) {
  const factor = (range[1] - range[0]) / (domain[1] - domain[0]);
  return (value) => range[0] + (value - domain[0]) * factor;
}

// The range of some values with a little room; a single value gets room on both sides.
function domainOf(values, includeZero) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null || !Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  if (includeZero) { low = Math.min(low, 0); high = Math.max(high, 0); }
  if (low === high) { const room = Math.abs(low) * 0.1 || 1; return includeZero && low === 0 ? [0, 1] : [low - room, high + room]; }
  const room = (high - low) * 0.06;
  return [includeZero && low === 0 ? 0 : low - room, high + room];
}

// Values at these fractions of the sorted list: outliers of single steps must not flatten a curve.
function quantiles(values, fractions) {
  const sorted = values.filter((value) => value !== null && Number.isFinite(value)).sort((a, b) => a - b);
  return sorted.length ? fractions.map((fraction) => sorted[Math.round(fraction * (sorted.length - 1))]) : [];
}

function frame(plot, chart, height) {
  const width = Math.max(240, Math.floor(plot.clientWidth || 560));
  const root = svg('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img', tabindex: '0' });
  root.setAttribute('aria-label', `${chart.title}${chart.unit ? `, ${chart.unit}` : ''}. Arrow keys read out values.`);
  return { root, width, height };
}

function axes(root, box, x, y, options) {
  const { xTicks, yTicks, xName, xFormat, yFormat, yStep, xStep } = options;
  for (const value of yTicks) {
    root.append(svg('line', { class: 'gridline', x1: box.left, x2: box.right, y1: y(value), y2: y(value) }));
    root.append(svg('text', { x: box.left - 6, y: y(value) + 4, 'text-anchor': 'end' }, formatted(value, yFormat, yStep)));
  }
  for (const value of xTicks) {
    const at = x(value);
    root.append(svg('line', { class: 'axis', x1: at, x2: at, y1: box.bottom, y2: box.bottom + 4 }));
    root.append(svg('text', { x: at, y: box.bottom + 16, 'text-anchor': 'middle' }, formatted(value, xFormat, xStep)));
  }
  root.append(svg('line', { class: 'axis', x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  if (xName) root.append(svg('text', { x: box.right, y: box.bottom + 31, 'text-anchor': 'end' }, xName));
}

// How wide the labels of the vertical axis are, about.
function labelWidth(values, kind, step) {
  return 12 + 6.6 * Math.max(1, ...values.map((value) => formatted(value, kind, step).length));
}

function makeTip(plot) {
  const tip = html('div', { class: 'tip', role: 'status' });
  tip.hidden = true;
  plot.append(tip);
  return tip;
}

// How far below the top of its plot a chart begins: below the legend.
function topOf(root, plot) {
  return root.getBoundingClientRect().top - plot.getBoundingClientRect().top;
}

function placeTip(tip, plot, x, y) {
  tip.hidden = false;
  const space = plot.clientWidth;
  const isRight = x < space / 2;  // the side with more space, so that the values stay visible
  tip.style.maxWidth = `${Math.min(300, Math.max(170, (isRight ? space - x : x) - 14))}px`;
  const left = isRight ? x + 14 : x - tip.offsetWidth - 14;
  tip.style.left = `${Math.max(0, Math.min(left, space - tip.offsetWidth))}px`;
  tip.style.top = `${Math.max(0, y)}px`;
}

function tipRow(colour, name, value, more) {
  const key = html('span', { class: `key ${colourClass(colour)}` });
  return html('div', {}, key, html('span', {}, name), html('span', { class: 'value' }, value, more ? html('span', { class: 'more' }, ` ${more}`) : ''));
}

// Buttons that show and hide a series; none for a single one.
function legend(plot, series, hidden, redraw) {
  if (series.length < 2) return;
  const buttons = series.map((one, i) => {
    const key = html('span', { class: `key ${colourClass(one.colour)}${one.dashed ? ' dashed' : ''}` });
    const button = html('button', { type: 'button', 'aria-pressed': String(!hidden.has(i)) }, key, one.name);
    button.addEventListener('click', () => {
      if (hidden.has(i)) hidden.delete(i); else hidden.add(i);
      redraw(i);
    });
    return button;
  });
  plot.append(html('div', { class: 'legend' }, ...buttons));
}
