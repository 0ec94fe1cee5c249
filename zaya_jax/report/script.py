"""The report's script: reads out values under a cursor, and zooms; by pointer, touch and keyboard, without a network.

The page is complete without it. It needs no data of its own: curves are read back from their drawn points
with the scales in `data-x` and `data-y`, heat maps from the digits in `data-cells`, bars have theirs in `data-values`.
A zoom is kept by the figure's id and in the axis' values, so that it outlives a figure that `live` replaces.
"""

SCRIPT = """
'use strict';
const FAR = 9000, NEAREST = 6;  // pixels: where values outside the picture were put; a drag that is none
const numbers = text => text.trim().split(/\\s+/).map(Number);
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

function show(value, digits = 4) {
  const size = Math.abs(value);
  if (size >= 9999.5)
    for (const [limit, suffix] of [[1e12, 'T'], [1e9, 'B'], [1e6, 'M'], [1e3, 'k']])
      if (size >= limit) return +(value / limit).toPrecision(digits) + suffix;
  return String(size && size < 1e-4 ? value.toExponential(2) : +value.toPrecision(digits));
}

function nearest(points, x) {
  let best = null;
  for (const point of points)
    if (!best || Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
  return best;
}

// Round numbers between low and high, at most `most` of them.
function ticks(low, high, most = 5) {
  if (!(high > low)) return [low];
  const raw = (high - low) / (most - 1), power = 10 ** Math.floor(Math.log10(raw));
  for (const factor of [1, 2, 2.5, 5, 10, 20]) {
    const step = factor * power, first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
    if (last - first < most) return Array.from({length: last - first + 1}, (_, i) => (first + i) * step);
  }
  return [low, high];
}

// An axis as its data attribute has it: pixels to values and back.
function axis(text) {
  const [low, high, start, end, log] = numbers(text);
  return {
    low, high, start, end, log,
    value(at) {
      const part = (at - start) / (end - start);
      return log ? low * (high / low) ** part : low + part * (high - low);
    },
    place(value) {
      const part = log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
      return start + part * (end - start);
    },
  };
}

// What of [from, to] can be shown: inside the whole, and not thinner than a thousandth of it.
function inside(from, to, low, high) {
  const wide = clamp(to - from, (high - low) / 1000, high - low);
  const begin = clamp((from + to - wide) / 2, low, high - wide);
  return [begin, begin + wide];
}

// The part of a picture that has the points between a and b, with a little room: where its values begin and end.
function fitted(lines, a, b, bottom, top) {
  let low = Infinity, high = -Infinity;
  for (const {points} of lines)
    for (const [x, y] of points)
      if (x >= a - 0.06 && x <= b + 0.06 && Math.abs(y) < FAR) { low = Math.min(low, y); high = Math.max(high, y); }
  if (low > high) return [bottom, top];
  const room = Math.max(0.06 * (high - low), 0.5);
  return [high + room, low - room];
}

const zooms = new Map(), cursors = new Map();  // by a figure's id: [from, to] and the place, in the axis' values
const told = document.createElement('p');
told.className = 'told';
told.setAttribute('role', 'status');
told.setAttribute('aria-live', 'polite');
let dragging = false;

function curves(svg, figure, at) {
  const x = axis(svg.dataset.x), y = axis(svg.dataset.y), over = svg.dataset.over || 'step', unit = svg.dataset.unit;
  const cursor = svg.querySelector('.cursor'), select = svg.querySelector('.select');
  const [xs, ys, labels] = ['.xs', '.ys', '.labels'].map(name => svg.querySelector(name));
  const axes = [xs.innerHTML, ys.innerHTML], shapes = [];
  const lines = [...svg.querySelectorAll('g[data-line]')].map(group => {
    const points = [], out = figure.querySelector(`b[data-line="${group.dataset.line}"]`);
    for (const shape of group.children) {
      const round = shape.tagName === 'circle';
      const pairs = round ? [[+shape.getAttribute('cx'), +shape.getAttribute('cy')]]
        : shape.getAttribute('points').split(' ').map(pair => pair.split(',').map(Number));
      shapes.push({shape, pairs, round});
      if (shape.tagName === 'polyline' || shape.classList.contains('alone')) points.push(...pairs);
    }
    const dots = group.querySelector('polyline.dots') !== null, first = points[0], last = points[points.length - 1];
    const gap = 1 + 1.5 * (points.length > 1 ? (last[0] - first[0]) / (points.length - 1) : 0);
    return {points, out, dots, gap, name: out.parentNode.firstChild.nextSibling.textContent.trim(),
      last: out.textContent};
  });
  const marks = [...svg.querySelectorAll('.bad')].map(mark => ({
    mark, x: parseFloat(mark.querySelector('.rule').getAttribute('d').slice(1)),
  }));
  const places = [...new Set(lines.flatMap(line => line.points.map(point => point[0])))].sort((a, b) => a - b);
  let [a, b, bottom, top] = [x.start, x.end, y.start, y.end];
  const toX = px => x.start + (px - a) / (b - a) * (x.end - x.start);
  const toY = px => y.start + (px - bottom) / (top - bottom) * (y.end - y.start);
  const fromX = px => a + (px - x.start) / (x.end - x.start) * (b - a);
  const whole = ['step', 'tokens', 'place'].includes(over);
  const count = px => whole ? show(Math.round(x.value(px)), 7) : show(x.value(px), 3);
  const name = px => over + ' ' + count(px);
  const rest = () => zooms.has(figure.id) ? `${name(a)} – ${count(b)}` : '';

  function draw() {
    const zoom = zooms.get(figure.id);
    [a, b] = zoom ? inside(x.place(zoom[0]), x.place(zoom[1]), x.start, x.end) : [x.start, x.end];
    [bottom, top] = zoom ? fitted(lines, a, b, y.start, y.end) : [y.start, y.end];
    for (const {shape, pairs, round} of shapes) {
      if (round) {
        const px = toX(pairs[0][0]);
        shape.setAttribute('cx', px.toFixed(1));
        shape.setAttribute('cy', toY(pairs[0][1]).toFixed(2));
        shape.style.display = px < x.start - 1 || px > x.end + 1 ? 'none' : '';
      } else shape.setAttribute('points', pairs.map(([px, py]) =>
        toX(px).toFixed(1) + ',' + (Math.abs(py) < FAR ? toY(py) : py).toFixed(2)).join(' '));
    }
    for (const {mark, x: px} of marks) {
      mark.setAttribute('transform', `translate(${(toX(px) - px).toFixed(1)} 0)`);
      mark.style.display = px < a - 1 || px > b + 1 ? 'none' : '';
    }
    labels.style.display = zoom ? 'none' : '';
    svg.classList.toggle('zoomed', Boolean(zoom));
    [xs.innerHTML, ys.innerHTML] = zoom ? [drawnX(), drawnY()] : axes;
  }

  function drawnX() {
    const low = x.value(a), high = x.value(b);
    let out = `<path class="axis" d="M${x.start} ${y.start}H${x.end}"/>`;
    for (const value of ticks(low, high)) {
      const px = toX(x.place(value));
      const anchor = px > x.end - 14 ? 'end' : px < x.start + 14 ? 'start' : 'middle';
      out += `<path class="axis" d="M${px.toFixed(1)} ${y.start}v4"/>` +
        `<text x="${px.toFixed(1)}" y="${y.start + 18}" text-anchor="${anchor}">${show(value, 7)}</text>`;
    }
    return out;
  }

  function drawnY() {
    const low = y.value(bottom), high = y.value(top);
    return ticks(low, high).map(value => {
      const py = toY(y.place(value)).toFixed(1);
      return `<path class="grid" d="M${x.start} ${py}H${x.end}"/>` +
        `<text x="${x.start - 6}" y="${+py + 4}" text-anchor="end">${show(value, 5)}${unit}</text>`;
    }).join('');
  }

  function valueOf(line, place) {
    const point = nearest(line.points, place);
    if (!point || !line.dots && Math.abs(point[0] - place) > line.gap) return '–';
    if (Math.abs(point[1]) >= FAR) return 'outside';
    const value = show(y.value(point[1])) + unit;
    const another = whole ? count(point[0]) !== count(place) : Math.abs(point[0] - place) > 1;
    return line.dots && another ? `${value} (${name(point[0])})` : value;
  }

  function stand(place) {
    for (const line of lines) line.out.textContent = valueOf(line, place);
    cursor.setAttribute('transform', `translate(${toX(place).toFixed(1)} 0)`);
    cursor.style.visibility = 'visible';
    at.textContent = name(place);
    cursors.set(figure.id, x.value(place));
    return `${name(place)}: ${lines.map(line => `${line.name} ${line.out.textContent}`).join(', ')}`;
  }

  function leave() {
    cursor.style.visibility = 'hidden';
    cursors.delete(figure.id);
    at.textContent = rest();
    for (const {out, last} of lines) out.textContent = last;
  }

  function zoom(from, to) {
    const seen = places.filter(place => place >= from - 0.06 && place <= to + 0.06);
    if (to - from >= x.end - x.start - 0.01) zooms.delete(figure.id);
    else if (seen.length < 2) { at.textContent = 'nothing to see closer'; return at.textContent; }
    else zooms.set(figure.id, [x.value(from), x.value(to)]);
    draw();
    leave();
    return rest() ? `zoomed to ${rest()}` : 'whole picture';
  }

  draw();
  leave();
  return {
    leave, stand, places, x,
    back: () => zoom(x.start, x.end),
    move(px) {
      const seen = places.filter(place => place >= a - 0.06 && place <= b + 0.06);
      const place = nearest(seen.map(one => [one]), fromX(px));
      return place ? stand(place[0]) : '';
    },
    drag(from, to) {
      const [low, high] = [Math.min(from, to), Math.max(from, to)].map(px => clamp(px, x.start, x.end));
      select.setAttribute('x', low);
      select.setAttribute('width', Math.max(0, high - low));
      select.style.visibility = high - low > NEAREST ? 'visible' : 'hidden';
    },
    drop(from, to) {
      select.style.visibility = 'hidden';
      const [low, high] = [Math.min(from, to), Math.max(from, to)].map(px => clamp(px, x.start, x.end));
      return high - low > NEAREST ? zoom(fromX(low), fromX(high)) : '';
    },
    key(key, far) {
      const seen = places.filter(place => place >= a - 0.06 && place <= b + 0.06);
      if (!seen.length) return '';
      const kept = cursors.has(figure.id) ? x.place(cursors.get(figure.id)) : null;
      const now = kept === null ? -1 : seen.indexOf(nearest(seen.map(one => [one]), kept)[0]);
      const by = far ? Math.max(1, Math.round(seen.length / 10)) : 1, last = seen.length - 1;
      if (key === 'ArrowRight') return stand(seen[kept === null ? 0 : Math.min(last, now + by)]);
      if (key === 'ArrowLeft') return stand(seen[kept === null ? last : Math.max(0, now - by)]);
      if (key === 'Home') return stand(seen[0]);
      if (key === 'End') return stand(seen[last]);
      if (key === '0') return zoom(x.start, x.end);
      if (key === '+' || key === '=' || key === '-') {
        const middle = kept === null ? (a + b) / 2 : seen[now], wide = (b - a) * (key === '-' ? 2 : 0.5);
        const said = zoom(...inside(middle - wide / 2, middle + wide / 2, x.start, x.end));
        if (kept !== null) stand(middle);
        return said;
      }
      return null;
    },
  };
}

function cells(svg, figure, at) {
  const data = svg.dataset, rows = data.rows.split('|'), size = Number(data.size);
  const edges = numbers(data.edges), steps = numbers(data.steps), tops = numbers(data.tops);
  let row = -1, column = -1;
  function tell() {
    const place = 2 * (row * steps.length + column);
    const code = data.cells.slice(place, place + 2);
    const value = Number(data.low) + (data.high - data.low) * parseInt(code, 36) / 1295;
    const share = data.percent === 'all' || data.percent === 'last' && row === rows.length - 1;
    const short = share ? show(+(100 * value).toPrecision(3)) + ' %' : show(+value.toPrecision(3)) + data.unit;
    const name = (/^\\d/.test(rows[row]) ? data.heat + ' ' : '') + rows[row];
    at.textContent = `${name}, ${data.column} ${show(steps[column])}: ${code === '--' ? '–' : short}`;
    return at.textContent;
  }
  return {
    move(x, y) {
      column = edges.findIndex((edge, i) => x >= edge && x <= edges[i + 1]);
      row = tops.findIndex(top => y >= top && y <= top + size);
      at.textContent = '';
      return column < 0 || row < 0 ? '' : tell();
    },
    leave() {
      row = column = -1;
      at.textContent = '';
    },
    key(key, far) {
      const [right, down] = {ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1],
        Home: [-Infinity, 0], End: [Infinity, 0]}[key] || [0, 0];
      if (!right && !down) return null;
      const by = far ? Math.max(1, Math.round(steps.length / 10)) : 1, begun = column >= 0 && row >= 0;
      column = begun ? clamp(column + right * by, 0, steps.length - 1) : 0;
      row = begun ? clamp(row + down, 0, rows.length - 1) : 0;
      return tell();
    },
  };
}

function bars(svg, figure, at) {
  const out = [...figure.querySelectorAll('b[data-line]')], medians = out.map(one => one.textContent);
  const all = [...svg.querySelectorAll('[data-values]')];
  let now = -1;
  const tell = (name, texts) => {
    at.textContent = name;
    out.forEach((one, i) => { one.textContent = texts[i]; });
    return name;
  };
  const rest = svg.dataset.rest || (all.length > 1 ? 'medians' : '');
  const stand = bar => `${tell(bar.dataset.name, bar.dataset.values.split('|'))}: ${out.map(one =>
    one.parentNode.textContent.trim()).join(', ')}`;
  tell(rest, medians);
  return {
    move(x, y, target) {
      const bar = target.closest('[data-values]');
      if (bar) now = all.indexOf(bar);
      return bar ? stand(bar) : '';
    },
    leave() {
      now = -1;
      tell(rest, medians);
    },
    key(key, far) {
      const by = {ArrowRight: far ? 10 : 1, ArrowLeft: far ? -10 : -1, Home: -Infinity, End: Infinity}[key];
      if (!by || !all.length) return null;
      now = clamp(now + by, 0, all.length - 1);
      return stand(all[now]);
    },
  };
}

const readers = new Map();  // by a figure's id
const HELP = 'arrow keys read its values' +
  ', with Shift in larger steps; Escape ends';

function setUp(figure) {
  const svg = figure.querySelector('svg'), title = svg && svg.querySelector('title');
  if (!title) return;
  svg.setAttribute('aria-label', title.textContent);  // a <title> would also be shown as a tooltip
  svg.removeAttribute('aria-labelledby');
  title.remove();
  const make = svg.dataset.x ? curves : svg.dataset.bars ? bars : svg.dataset.cells ? cells : null;
  if (!make) return;
  const reader = make(svg, figure, figure.querySelector('.at'));
  readers.set(figure.id, reader);
  svg.setAttribute('role', 'application');  // so that a screen reader leaves the arrow keys to the picture
  svg.setAttribute('aria-roledescription', 'picture; ' + HELP + (reader.drop ? '; plus, minus and 0 zoom' : ''));
  svg.setAttribute('tabindex', '0');
  const place = event => {
    const matrix = svg.getScreenCTM();
    return [(event.clientX - matrix.e) / matrix.a, (event.clientY - matrix.f) / matrix.d, event.target];
  };
  let from = null;
  svg.addEventListener('pointermove', event => {
    const where = place(event);
    reader.move(...where);
    if (from !== null) reader.drag(from, where[0]);
  });
  svg.addEventListener('pointerdown', event => {
    reader.move(...place(event));
    if (!reader.drop || event.button) return;
    from = place(event)[0];
    dragging = true;
    svg.setPointerCapture(event.pointerId);
  });
  const end = event => {
    if (from !== null && event.type === 'pointerup') reader.drop(from, place(event)[0]);
    else if (from !== null) reader.drop(from, from);
    from = null;
    dragging = false;
  };
  svg.addEventListener('pointerup', end);
  svg.addEventListener('pointercancel', end);
  svg.addEventListener('pointerleave', event => {
    if (from === null && event.pointerType !== 'touch') reader.leave();  // what a finger has tapped stays to be read
  });
  svg.addEventListener('dblclick', () => { if (reader.back) told.textContent = reader.back(); });
  svg.addEventListener('blur', () => reader.leave());
  svg.addEventListener('keydown', event => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === 'Escape') { reader.leave(); return; }
    const said = reader.key(event.key, event.shiftKey);
    if (said === null) return;
    event.preventDefault();
    told.textContent = said;
  });
}

document.body.append(told);
for (const figure of document.querySelectorAll('figure')) setUp(figure);
"""
