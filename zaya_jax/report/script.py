"""The report's script: reads out the values under the pointer, in the legend of the picture.

The page is complete without it. It needs no data of its own: curves are read back from their drawn points
with the scales in `data-x` and `data-y`, heat maps from the digits in `data-cells`, bars have theirs in `data-values`.
"""

SCRIPT = """
'use strict';
const numbers = text => text.trim().split(/\\s+/).map(Number);

function show(value) {
  const size = Math.abs(value);
  if (size >= 9999.5)
    for (const [limit, suffix] of [[1e12, 'T'], [1e9, 'B'], [1e6, 'M'], [1e3, 'k']])
      if (size >= limit) return +(value / limit).toPrecision(4) + suffix;
  return String(size && size < 1e-4 ? value.toExponential(2) : +value.toPrecision(4));
}

function nearest(points, x) {
  let best = null;
  for (const point of points)
    if (!best || Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
  return best;
}

function curves(svg, figure, at) {
  const [firstStep, lastStep, left, right] = numbers(svg.dataset.x);
  const [low, high, bottom, top, log] = numbers(svg.dataset.y);
  const cursor = svg.querySelector('.cursor');
  const valueAt = y => {
    const part = (y - bottom) / (top - bottom);
    return log ? low * (high / low) ** part : low + part * (high - low);
  };
  const lines = [...svg.querySelectorAll('g[data-line]')].map(group => {
    const points = [];
    for (const line of group.querySelectorAll('polyline'))
      for (const pair of line.getAttribute('points').split(' ')) points.push(pair.split(',').map(Number));
    const out = figure.querySelector(`b[data-line="${group.dataset.line}"]`);
    return {points, out, last: out.textContent};
  });
  const all = lines.flatMap(line => line.points);
  return {
    move(x) {
      const place = nearest(all, x);
      if (!place) return;
      for (const {points, out} of lines) {
        const point = nearest(points, place[0]);
        if (!point) continue;
        const inside = Math.abs(point[1]) < 9000;
        out.textContent = inside ? show(valueAt(point[1])) + svg.dataset.unit : 'outside';
      }
      cursor.setAttribute('transform', `translate(${place[0]} 0)`);
      cursor.style.visibility = 'visible';
      const step = firstStep + (place[0] - left) / (right - left) * (lastStep - firstStep);
      at.textContent = 'step ' + show(Math.round(step));
    },
    leave() {
      cursor.style.visibility = 'hidden';
      at.textContent = '';
      for (const {out, last} of lines) out.textContent = last;
    },
  };
}

function cells(svg, figure, at) {
  const data = svg.dataset, rows = data.rows.split('|'), size = Number(data.size);
  const edges = numbers(data.edges), steps = numbers(data.steps), tops = numbers(data.tops);
  return {
    move(x, y) {
      const column = edges.findIndex((edge, i) => x >= edge && x <= edges[i + 1]);
      const row = tops.findIndex(top => y >= top && y <= top + size);
      at.textContent = '';
      if (column < 0 || row < 0) return;
      const place = 2 * (row * steps.length + column);
      const code = data.cells.slice(place, place + 2);
      const value = Number(data.low) + (data.high - data.low) * parseInt(code, 36) / 1295;
      const share = data.percent === 'all' || data.percent === 'last' && row === rows.length - 1;
      const short = share ? show(+(100 * value).toPrecision(3)) + ' %' : show(+value.toPrecision(3)) + data.unit;
      const name = (/^\\d/.test(rows[row]) ? data.heat + ' ' : '') + rows[row];
      at.textContent = `${name}, ${data.column} ${show(steps[column])}: ${code === '--' ? '–' : short}`;
    },
    leave() {
      at.textContent = '';
    },
  };
}

function bars(svg, figure, at) {
  const out = [...figure.querySelectorAll('b[data-line]')], medians = out.map(one => one.textContent);
  const tell = (name, texts) => {
    at.textContent = name;
    out.forEach((one, i) => { one.textContent = texts[i]; });
  };
  const rest = svg.dataset.rest || (svg.querySelectorAll('[data-values]').length > 1 ? 'medians' : '');
  tell(rest, medians);
  return {
    move(x, y, target) {
      const bar = target.closest('[data-values]');
      if (bar) tell(bar.dataset.name, bar.dataset.values.split('|'));
    },
    leave() {
      tell(rest, medians);
    },
  };
}

for (const svg of document.querySelectorAll('figure svg')) {
  const figure = svg.closest('figure'), title = svg.querySelector('title');
  svg.setAttribute('aria-label', title.textContent);  // a <title> would also be shown as a tooltip
  svg.removeAttribute('aria-labelledby');
  title.remove();
  const reader = (svg.dataset.x ? curves : svg.dataset.bars ? bars : cells)(svg, figure, figure.querySelector('.at'));
  const move = event => {
    const matrix = svg.getScreenCTM();
    reader.move((event.clientX - matrix.e) / matrix.a, (event.clientY - matrix.f) / matrix.d, event.target);
  };
  svg.addEventListener('pointermove', move);
  svg.addEventListener('pointerdown', move);
  svg.addEventListener('pointerleave', reader.leave);
}
"""
