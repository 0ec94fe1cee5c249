"""The script of a page that is watched: asks for the parts that have changed, and puts them in place of the old ones.

Zooms, cursors, folds, inner scrolling and the focus stay; while something is dragged, the page waits.
"""

EVERY = 2.0  # seconds between two questions

SCRIPT = """
'use strict';
const state = document.getElementById('live');
let version = state.dataset.version, asking = false;

function kept(part) {
  const all = name => [...part.querySelectorAll(name)];
  const focus = part.contains(document.activeElement) ? document.activeElement : null;
  const stops = all('svg[tabindex], summary, input');
  return {
    folds: new Map(all('details').map((one, i) => [foldName(one, i), one.open])),
    scrolls: all('.scroll, .card').map(one => [one.scrollLeft, one.scrollTop]),
    cursor: new Map(cursors),  // taking a picture away takes its cursor
    checked: all('input:checked').map(one => one.id),
    focus: focus && [stops.indexOf(focus), focus.closest('figure') ? focus.closest('figure').id : '', focus.tagName],
  };
}

function foldName(fold, i) {
  const figure = fold.closest('figure'), words = fold.querySelector('summary').firstChild.textContent;
  return figure ? figure.id : words || String(i);
}

function restore(part, was) {
  const all = name => [...part.querySelectorAll(name)];
  all('details').forEach((one, i) => { one.open = was.folds.get(foldName(one, i)) ?? one.open; });
  for (const id of was.checked) { const one = document.getElementById(id); if (one) one.checked = true; }
  for (const figure of all('figure')) {
    setUp(figure);
    const reader = readers.get(figure.id);
    if (reader && reader.stand && was.cursor.has(figure.id)) {
      const place = nearest(reader.places.map(one => [one]), reader.x.place(was.cursor.get(figure.id)));
      if (place) reader.stand(place[0]);
    }
  }
  all('.scroll, .card').forEach((one, i) => { if (was.scrolls[i]) [one.scrollLeft, one.scrollTop] = was.scrolls[i]; });
  if (!was.focus) return;
  const [place, id, tag] = was.focus, figure = id && document.getElementById(id);
  const stop = figure ? figure.querySelector(tag) : all('svg[tabindex], summary, input')[place];
  if (stop) stop.focus({preventScroll: true});
}

function put(name, html, order) {
  let part = document.querySelector(`[data-part="${name}"]`);
  if (!part) {
    part = document.createElement('div');
    part.dataset.part = name;
    const after = order.slice(order.indexOf(name) + 1).map(one => document.querySelector(`[data-part="${one}"]`));
    const main = document.querySelector('main');
    main.insertBefore(part, after.find(Boolean) || main.querySelector('footer'));
  }
  const was = kept(part), top = scrollY, tall = part.offsetHeight, above = part.getBoundingClientRect().bottom < 0;
  part.innerHTML = html;
  restore(part, was);
  // What is above the window may have grown: what is read must not move.
  scrollTo(scrollX, above ? top + part.offsetHeight - tall : top);
}

async function ask() {
  if (asking || dragging || document.hidden) return;
  asking = true;
  try {
    const answer = await fetch('new?v=' + encodeURIComponent(version), {cache: 'no-store'});
    if (!answer.ok) throw new Error(answer.status);
    const news = await answer.json();
    if (dragging) return;
    for (const part of document.querySelectorAll('[data-part]'))
      if (!news.order.includes(part.dataset.part)) part.remove();
    for (const [name, html] of Object.entries(news.parts)) put(name, html, news.order);
    version = news.version;
    document.title = news.title;
    tell(news.trouble || 'Live: the page follows the run.');
  } catch {
    tell('No answer: the program that serves this page has ended, or is busy. Trying again.');
  } finally {
    asking = false;
  }
}

function tell(words) {
  if (state.textContent !== words) state.textContent = words;
}

document.addEventListener('visibilitychange', ask);
setInterval(ask, 1000 * Number(state.dataset.every));
"""


def parts_of_page(version: str) -> str:
    """What is put at the end of a page that is watched."""
    return (
        f'<p id="live" class="live" role="status" data-version="{version}" data-every="{EVERY:g}">'
        f"Live: the page follows the run.</p><script>{SCRIPT}</script>"
    )
