// The kinds of charts. Each draws into `plot` and returns nothing; `state` keeps what the reader chose when it is drawn again.

function lineChart(plot, chart, state) {
  const series = chart.series.filter((_, i) => !state.hidden.has(i));
  legend(plot, chart.series, state.hidden, state.redraw);
  const { root, width, height } = frame(plot, chart, PLOT_HEIGHT);
  const xs = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
  const yValues = series.flatMap((one) => [...one.y, ...(one.low || []), ...(one.high || []), ...quantiles(one.raw || [], [0.02, 0.98])]);
  const yDomain = chart.range && series.length ? fitted(chart.range, yValues) : domainOf(yValues, chart.zero);
  const yTicks = ticksBetween(yDomain[0], yDomain[1], 5);
  const yStep = yTicks.length > 1 ? yTicks[1] - yTicks[0] : undefined;
  const box = { left: labelWidth(yTicks, chart.format, yStep), right: width - 12, top: 10, bottom: height - 38 };
  const xDomain = xs.length > 1 ? [xs[0], xs[xs.length - 1]] : [(xs[0] || 0) - 1, (xs[0] || 0) + 1];
  const x = scale(xDomain, [box.left + 4, box.right - 4]);
  const y = scale(yDomain, [box.bottom, box.top]);
  const xTicks = xs.length > 1 ? ticksBetween(xDomain[0], xDomain[1], Math.max(2, Math.floor((box.right - box.left) / 80))).filter(Number.isInteger) : xs;
  axes(root, box, x, y, { xTicks, yTicks, xName: chart.x, xFormat: 'step', yFormat: chart.format, yStep });
  const clip = `clip-${chart.id}`;
  root.append(svg('clipPath', { id: clip }, svg('rect', { x: box.left, y: box.top - 4, width: box.right - box.left + 4, height: box.bottom - box.top + 8 })));
  for (const value of chart.guides || []) {
    if (value >= yDomain[0] && value <= yDomain[1]) root.append(svg('line', { class: 'guide', x1: box.left, x2: box.right, y1: y(value), y2: y(value) }));
  }
  const drawn = svg('g', { 'clip-path': `url(#${clip})` });
  root.append(drawn);
  for (const one of series) drawSeries(drawn, one, x, y);
  for (const mark of chart.marks || []) {
    root.append(svg('line', { class: 'mark', x1: x(mark.x), x2: x(mark.x), y1: box.top, y2: box.bottom }));
    const end = x(mark.x) > width - 60;
    root.append(svg('text', { class: 'mark-label', x: x(mark.x) + (end ? -5 : 5), y: box.top + 9, 'text-anchor': end ? 'end' : 'start' }, mark.label));
  }
  plot.append(root);
  readOut(plot, root, chart, series, { xs, x, y, box, width, state });
}

// A fixed range such as 0 to 1, narrowed to the half in which everything lies.
function fitted(range, values) {
  const [low] = domainOf(values, false);
  const middle = (range[0] + range[1]) / 2;
  const from = low > middle ? middle : range[0];
  return [from - (range[1] - from) * 0.03, range[1] + (range[1] - from) * 0.04];
}

function drawSeries(drawn, one, x, y) {
  const group = svg('g', { class: colourClass(one.colour) });
  const path = (values) => values.map((value, i) => (value === null ? '' : `${i && values[i - 1] !== null ? 'L' : 'M'}${x(one.x[i]).toFixed(1)} ${y(value).toFixed(1)}`)).join('');
  if (one.low && one.x.length > 1) {
    const there = one.high.map((value, i) => `${x(one.x[i]).toFixed(1)} ${y(value).toFixed(1)}`);
    const back = one.low.map((value, i) => `${x(one.x[i]).toFixed(1)} ${y(value).toFixed(1)}`).reverse();
    group.append(svg('path', { class: 'band', d: `M${[...there, ...back].join('L')}Z` }));
  }
  if (one.raw) group.append(svg('path', { class: 'raw', d: path(one.raw) }));
  group.append(svg('path', { class: `line${one.dashed ? ' dashed' : ''}`, d: path(one.y) }));
  if ((one.dots && one.x.length <= 25) || one.x.length === 1) {
    one.x.forEach((at, i) => {
      if (one.low && one.x.length === 1) group.append(svg('line', { class: 'whisker', x1: x(at), x2: x(at), y1: y(one.low[i]), y2: y(one.high[i]) }));
      group.append(svg('circle', { class: 'dot', cx: x(at), cy: y(one.y[i]), r: 4 }));
    });
  }
  drawn.append(group);
}

function nearest(sorted, value) {
  let low = 0;
  let high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle; else high = middle;
  }
  return Math.abs(sorted[low] - value) <= Math.abs(sorted[high] - value) ? low : high;
}

// The values at a step, for the pointer, a finger and the arrow keys.
function readOut(plot, root, chart, series, { xs, x, y, box, width, state }) {
  if (!xs.length) return;
  const cursor = svg('line', { class: 'cursor', y1: box.top, y2: box.bottom, visibility: 'hidden' });
  const dots = svg('g', {});
  root.append(cursor, dots);
  const tip = makeTip(plot);
  state.markStep = (step) => {
    const isOn = step !== null && step >= xs[0] && step <= xs[xs.length - 1];
    cursor.setAttribute('visibility', isOn ? 'visible' : 'hidden');
    if (isOn) { cursor.setAttribute('x1', x(step)); cursor.setAttribute('x2', x(step)); }
  };
  let at = xs.length - 1;
  const show = (index) => {
    at = Math.max(0, Math.min(xs.length - 1, index));
    const step = xs[at];
    dots.replaceChildren();
    const rows = series.map((one) => {
      const i = nearest(one.x, step);
      if (one.y[i] === null) return null;
      dots.append(svg('circle', { class: `dot ${colourClass(one.colour)}`, cx: x(one.x[i]), cy: y(one.y[i]), r: 4.5 }));
      const where = one.x[i] === step ? '' : ` (step ${formatted(one.x[i], 'step')})`;
      const range = one.low ? `${formatted(one.low[i], chart.format)} to ${formatted(one.high[i], chart.format)}` : '';
      return tipRow(one.colour, `${one.name}${where}`, formatted(one.y[i], chart.format), range);
    });
    tip.replaceChildren(html('b', {}, `step ${formatted(step, 'step')}`), ...rows.filter(Boolean));
    const shrink = root.clientWidth / width || 1;
    placeTip(tip, plot, x(step) * shrink, topOf(root, plot));
    for (const other of charts) if (other.markStep) other.markStep(step);
  };
  const hide = () => {
    tip.hidden = true;
    dots.replaceChildren();
    for (const other of charts) if (other.markStep) other.markStep(null);
  };
  const follow = (event) => {
    const bounds = root.getBoundingClientRect();
    const step = (((event.clientX - bounds.left) * width) / bounds.width - x(0)) / (x(1) - x(0));
    show(nearest(xs, step));
  };
  pointerAndKeys(root, follow, hide, (by) => show(tip.hidden ? at : at + by), () => show(0), () => show(xs.length - 1));
}

function pointerAndKeys(root, follow, hide, move, first, last) {
  root.addEventListener('pointermove', follow);
  root.addEventListener('pointerdown', follow);
  root.addEventListener('pointerleave', hide);
  root.addEventListener('blur', hide);
  root.addEventListener('keydown', (event) => {
    const actions = { ArrowLeft: () => move(-1), ArrowRight: () => move(1), Home: first, End: last, Escape: hide };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });
}

function histogramChart(plot, chart, state) {
  const series = chart.series.filter((_, i) => !state.hidden.has(i));
  legend(plot, chart.series, state.hidden, state.redraw);
  const { root, width, height } = frame(plot, chart, PLOT_HEIGHT);
  const widthOf = (one) => one.width || chart.width;
  const end = Math.max(...chart.series.map((one) => chart.first + widthOf(one) * one.counts.length));
  const highest = Math.max(1e-9, ...series.flatMap((one) => one.counts));
  const yTicks = ticksBetween(0, highest * 1.05, 4).filter((value) => chart.format || Number.isInteger(value));
  const yStep = yTicks.length > 1 ? yTicks[1] - yTicks[0] : undefined;
  const box = { left: labelWidth(yTicks, chart.format, yStep), right: width - 12, top: 10, bottom: height - 38 };
  const x = scale([chart.first, end], [box.left, box.right]);
  const y = scale([0, highest * 1.05], [box.bottom, box.top]);
  const xTicks = ticksBetween(chart.first, end, Math.max(2, Math.floor((box.right - box.left) / 70)));
  axes(root, box, x, y, { xTicks, yTicks, xName: chart.x, yFormat: chart.format, yStep, xStep: xTicks[1] - xTicks[0] });
  for (const one of series) {
    const steps = one.counts.map((count, i) => {
      const from = x(chart.first + widthOf(one) * i).toFixed(1);
      const to = x(chart.first + widthOf(one) * (i + 1)).toFixed(1);
      return `L${from} ${y(count).toFixed(1)}L${to} ${y(count).toFixed(1)}`;
    });
    const last = x(chart.first + widthOf(one) * one.counts.length).toFixed(1);
    root.append(svg('path', { class: `area ${colourClass(one.colour)}`, d: `M${x(chart.first).toFixed(1)} ${box.bottom}${steps.join('')}L${last} ${box.bottom}Z` }));
  }
  for (const value of chart.guides || []) root.append(svg('line', { class: 'guide', x1: x(value), x2: x(value), y1: box.top, y2: box.bottom }));
  plot.append(root);
  const tip = makeTip(plot);
  const bins = Math.round((end - chart.first) / chart.width);
  let at = 0;
  const show = (bin) => {
    at = Math.max(0, Math.min(bins - 1, bin));
    const from = chart.first + chart.width * at;
    const rows = series.map((one) => {
      const i = Math.floor((from + chart.width / 2 - chart.first) / widthOf(one));
      return tipRow(one.colour, one.name, formatted(one.counts[i] || 0, chart.format || 'step'), chart.format ? '' : 'pairs');
    });
    const title = `${chart.x} ${formatted(from)} to ${formatted(from + chart.width)}`;
    tip.replaceChildren(html('b', {}, title), ...rows);
    placeTip(tip, plot, (x(from) * root.clientWidth) / width, topOf(root, plot));
  };
  const follow = (event) => {
    const bounds = root.getBoundingClientRect();
    const value = chart.first + ((((event.clientX - bounds.left) * width) / bounds.width - box.left) / (box.right - box.left)) * (end - chart.first);
    show(Math.floor((value - chart.first) / chart.width));
  };
  pointerAndKeys(root, follow, () => { tip.hidden = true; }, (by) => show(tip.hidden ? at : at + by), () => show(0), () => show(bins - 1));
}

function barChart(plot, chart) {
  const row = 27;
  const { root, width, height } = frame(plot, chart, chart.bars.length * row + 40);
  const left = 14 + 6.6 * Math.max(...chart.bars.map((bar) => bar.label.length));
  const x = scale([0, 1], [left, width - 62]);
  chart.bars.forEach((bar, i) => {
    const top = i * row + 4;
    root.append(
      svg('text', { x: left - 8, y: top + 15, 'text-anchor': 'end' }, bar.label),
      svg('rect', { class: 'bar-track', x: x(0), y: top, width: x(1) - x(0), height: row - 7, rx: 3 }),
      svg('rect', { class: 'bar-value', x: x(0), y: top, width: Math.max(0, x(bar.value) - x(0)), height: row - 7, rx: 3 }),
      svg('text', { class: 'bar-text', x: x(1) + 8, y: top + 15 }, formatted(bar.value, chart.format)),
    );
  });
  for (const value of chart.guides || []) root.append(svg('line', { class: 'guide', x1: x(value), x2: x(value), y1: 0, y2: chart.bars.length * row }));
  root.append(svg('text', { x: 0, y: height - 14 }, chart.x));
  plot.append(root);
  const tip = makeTip(plot);
  let at = 0;
  const show = (index) => {
    at = Math.max(0, Math.min(chart.bars.length - 1, index));
    const bar = chart.bars[at];
    tip.replaceChildren(html('b', {}, `${bar.label} tokens: ${formatted(bar.value, chart.format)}`), html('p', {}, bar.note));
    placeTip(tip, plot, (left * root.clientWidth) / width, topOf(root, plot) + at * row + row);
  };
  const follow = (event) => {
    const bounds = root.getBoundingClientRect();
    show(Math.floor((((event.clientY - bounds.top) * height) / bounds.height) / row));
  };
  pointerAndKeys(root, follow, () => { tip.hidden = true; }, (by) => show(tip.hidden ? at : at + by), () => show(0), () => show(chart.bars.length - 1));
}

// A row of a pack, wrapped into lines like text. Every preference has a colour, prompt and completions are shades of it.
function packChart(plot, chart) {
  const space = Math.max(240, plot.clientWidth || 1000);
  const columns = Math.min(chart.length, Math.max(space < 600 ? 64 : 128, Math.ceil(chart.length / 64)));
  const lines = Math.ceil(chart.length / columns);
  const row = Math.max(5, Math.min(20, Math.floor(640 / lines)));
  const gap = row > 8 ? 3 : 1;
  const { root, width } = frame(plot, chart, lines * row + 4);
  const cell = width / columns;
  // 100 tokens from position 90 in lines of 128: 38 in the first line, 62 in the second.
  const pieces = (start, count) => {
    const found = [];
    for (let from = start; from < start + count;) {
      const line = Math.floor(from / columns);
      const until = Math.min(start + count, (line + 1) * columns);
      found.push({ x: (from % columns) * cell, y: line * row + 2, width: (until - from) * cell, height: row - gap });
      from = until;
    }
    return found;
  };
  for (const piece of pieces(0, chart.length)) root.append(svg('rect', { class: 'filler', ...piece }));
  const drawn = chart.segments.map((segment) => {
    const shade = ['prompt', 'chosen', 'rejected'].includes(segment.role) ? segment.role : 'completion';
    const rects = pieces(segment.start, segment.tokens).map((piece) => svg('rect', { class: `segment ${shade} ${colourClass(Number(segment.preference) || 0)}`, ...piece }));
    root.append(...rects);
    return rects;
  });
  plot.append(root);
  const tip = makeTip(plot);
  let at = 0;
  const clear = () => { for (const rect of drawn.flat()) rect.classList.remove('on'); };
  const hide = () => { tip.hidden = true; clear(); };
  const show = (index) => {
    at = Math.max(0, Math.min(chart.segments.length - 1, index));
    clear();
    for (const rect of drawn[at]) rect.classList.add('on');
    const segment = chart.segments[at];
    tip.replaceChildren(html('b', {}, `${segment.role}, ${segment.tokens} tokens`), html('div', {}, String(segment.place || '')), html('p', {}, String(segment.text || '')));
    const first = drawn[at][0];
    const shrink = root.clientWidth / width || 1;
    placeTip(tip, plot, Number(first.getAttribute('x')) * shrink, topOf(root, plot) + (Number(drawn[at][drawn[at].length - 1].getAttribute('y')) + row + 2) * shrink);
  };
  const follow = (event) => {
    const bounds = root.getBoundingClientRect();
    const column = Math.floor((((event.clientX - bounds.left) * width) / bounds.width) / cell);
    const line = Math.floor((((event.clientY - bounds.top) * width) / bounds.width - 2) / row);
    const token = line * columns + column;
    const index = chart.segments.findIndex((one) => one.start <= token && token < one.start + one.tokens);
    if (index < 0) hide(); else show(index);
  };
  pointerAndKeys(root, follow, hide, (by) => show(tip.hidden ? at : at + by), () => show(0), () => show(chart.segments.length - 1));
}

const KINDS = { line: lineChart, histogram: histogramChart, bars: barChart, pack: packChart };
