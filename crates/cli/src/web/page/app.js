// The page: which view is shown, the list of runs, runs side by side, a new run. `run.js` shows one run.
// Nothing here trusts a name, a prompt or a message: all of it is set as text.

import { Chart, ago, bytes, duration, el, number } from '/chart.js';
import { RunView } from '/run.js';

const main = document.getElementById('main');
export const TONES = ['ember', 'teal', 'violet', 'green', 'gold', 'rose', 'blue', 'grey'];
export const store = {
  get: (name, other) => { try { return localStorage.getItem(`hearth.${name}`) ?? other; } catch { return other; } },
  set: (name, value) => { try { localStorage.setItem(`hearth.${name}`, value); } catch { /* private window */ } },
};
export const axis = {
  get isMinutes() { return store.get('axis') === 'minutes'; },
  get name() { return this.isMinutes ? 'minute' : 'step'; },
  of: curve => axis.isMinutes ? curve.minutes : curve.steps,
};
export let isChangeable = true;
let view = null;
const chosen = new Set();

export async function ask(path, body) {
  const options = body === undefined ? {} : { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body) };
  let answer;
  try { answer = await fetch(path, { credentials: 'same-origin', ...options }); } catch { throw new Error('the server does not answer'); }
  const json = await answer.json().catch(() => ({}));
  if (answer.status === 401) signedOut();
  if (!answer.ok) throw Object.assign(new Error(json.error || `the server answered ${answer.status}`), { hint: json.hint });
  return json;
}

export function toast(text, tone = '') {
  const item = el('div', { class: `toast ${tone}` }, text);
  document.getElementById('toasts').append(item);
  setTimeout(() => item.remove(), tone === 'bad' ? 9000 : 5000);
}

export function link(text, tone) {
  const place = document.getElementById('link');
  place.textContent = text;
  place.className = `link ${tone}`;
}

export function dialog(title, content, buttons = []) {
  const box = el('dialog', { 'aria-label': title });
  const close = () => { box.close(); box.remove(); };
  box.append(el('h2', {}, title), ...content, el('div', { class: 'row end' },
    el('button', { class: 'quiet', onclick: close }, buttons.length ? 'Cancel' : 'Close'),
    ...buttons.map(({ text, tone, act }) => el('button', { class: tone || '', onclick: () => { if (act() !== true) close(); } }, text))));
  box.addEventListener('close', () => box.remove());
  box.addEventListener('click', event => { if (event.target === box) close(); });
  document.body.append(box);
  box.showModal();
  return box;
}

function signedOut() {
  view?.close?.();
  view = null;
  main.replaceChildren(el('div', { class: 'empty' }, el('h1', {}, 'This page needs its token'),
    el('p', {}, 'The server was started anew, or this browser never had its token. Open the URL that hearth serve printed.')));
}

export const STATES = {
  running: ['running', 'live'], paused: ['paused', 'warn'], finished: ['finished', 'done'], plateau: ['finished: plateau', 'done'],
  interrupted: ['stopped', 'still'], changed: ['stopped', 'still'], unhealthy: ['not learning', 'bad'], diverged: ['diverged', 'bad'],
  failed: ['failed', 'bad'], killed: ['killed', 'bad'], empty: ['nothing yet', 'still'],
};

export function badge(state) {
  const [text, tone] = STATES[state.kind === 'ended' ? state.reason : state.kind] || [state.kind, 'still'];
  const doing = state.kind === 'running' && state.phase ? `: ${state.phase}` : '';
  return el('span', { class: `badge ${tone}` }, el('i'), text + doing);
}

export function progress(run) {
  const share = run.steps ? Math.min(1, run.step / run.steps) : 0;
  const bar = el('div', { class: 'progress', role: 'progressbar', 'aria-valuenow': Math.round(share * 100), 'aria-valuemin': 0, 'aria-valuemax': 100 }, el('i'));
  bar.firstChild.style.width = `${share * 100}%`;
  return bar;
}

class RunsView {
  constructor() {
    this.body = el('div', { class: 'runs' });
    this.compare = el('a', { class: 'button', hidden: true }, 'Compare');
    main.replaceChildren(el('div', { class: 'head' }, el('h1', {}, 'Runs'), el('span', { class: 'grow' }), this.compare), this.body);
    this.load();
    this.timer = setInterval(() => this.load(), 2000);
  }

  close() { clearInterval(this.timer); }

  async load() {
    if (document.hidden) return;
    try {
      const { runs, version, is_changeable } = await ask('/api/runs');
      isChangeable = is_changeable;
      document.getElementById('nav-new').hidden = !is_changeable;
      link(`hearth ${version}`, 'quiet');
      this.show(runs.filter(Boolean));
    } catch (error) { link(error.message, 'bad'); }
  }

  show(runs) {
    if (view !== this) return;
    const active = it => it.state.kind === 'running' || it.state.kind === 'paused';
    runs.sort((a, b) => active(b) - active(a) || b.time - a.time);
    const focused = document.activeElement?.dataset?.id;
    this.body.replaceChildren(...runs.map(run => this.row(run)));
    if (focused) this.body.querySelector(`a[data-id="${CSS.escape(focused)}"]`)?.focus();
    if (!runs.length) {
      this.body.append(el('div', { class: 'empty' }, el('h2', {}, 'No runs here yet'),
        el('p', {}, 'A run appears as soon as it begins: '), el('pre', {}, 'hearth train recipes/demo.toml')));
    }
    const ids = [...chosen].filter(id => runs.some(run => run.id === id));
    this.compare.hidden = ids.length < 2;
    this.compare.textContent = `Compare ${ids.length}`;
    this.compare.href = `#/compare/${ids.join(',')}`;
  }

  row(run) {
    const box = el('input', { type: 'checkbox', 'aria-label': `compare ${run.name}` });
    box.checked = chosen.has(run.id);
    box.addEventListener('change', () => { if (box.checked) chosen.add(run.id); else chosen.delete(run.id); this.load(); });
    const active = run.state.kind === 'running' || run.state.kind === 'paused';
    const fact = (label, value) => el('span', { class: 'fact' }, el('small', {}, label), value);
    return el('div', { class: 'runrow' }, el('label', { class: 'pick' }, box),
      el('a', { href: `#/run/${run.id}`, 'data-id': run.id },
        el('div', { class: 'title' }, el('b', {}, run.name), badge(run.state), el('span', { class: 'grow' }),
          el('small', { class: 'muted' }, active && run.eta_secs != null ? `${duration(run.eta_secs)} left` : ago(run.time))),
        progress(run),
        el('div', { class: 'facts' },
          fact('step', run.steps ? `${number(run.step)} / ${number(run.steps)}` : '–'), fact('loss', number(run.loss)),
          run.validation ? fact('held-out', number(run.validation.loss)) : null, fact('per step', duration(run.step_secs)),
          run.device.telemetry?.temperature ? fact('heat', `${Math.round(run.device.telemetry.temperature.celsius)} °C`) : null,
          run.n_warnings ? fact('warnings', String(run.n_warnings)) : null)));
  }
}

class CompareView {
  constructor(ids) {
    this.ids = ids;
    this.picker = el('div', { class: 'picker' });
    const panel = (title, options) => {
      const body = el('section', { class: 'panel wide' }, el('h2', {}, title));
      return [body, new Chart(body, { legend: true, height: 280, ...options })];
    };
    const [loss, lossChart] = panel('Loss, smoothed');
    const [held, heldChart] = panel('Held-out loss', { none: 'nothing is held out in these runs' });
    const [speed, speedChart] = panel('Seconds per step', { format: duration, zero: true });
    this.charts = { smoothed: lossChart, held_out: heldChart, step_secs: speedChart };
    this.settings = el('section', { class: 'panel wide' }, el('h2', {}, 'Settings that differ'));
    main.replaceChildren(el('div', { class: 'head' }, el('h1', {}, 'Side by side')), this.picker, el('div', { class: 'grid' }, loss, held, speed, this.settings));
    this.load();
    this.timer = setInterval(() => { if (!document.hidden) this.load(); }, 5000);
  }

  close() { clearInterval(this.timer); }
  redraw() { this.draw(); }

  async load() {
    try {
      const { runs } = await ask('/api/runs');
      const pick = run => {
        const box = el('input', { type: 'checkbox' });
        box.checked = this.ids.includes(run.id);
        box.addEventListener('change', () => {
          this.ids = box.checked ? [...this.ids, run.id] : this.ids.filter(id => id !== run.id);
          history.replaceState(null, '', `#/compare/${this.ids.join(',')}`);
          this.load();
        });
        const tone = this.ids.includes(run.id) ? TONES[this.ids.indexOf(run.id) % TONES.length] : '';
        return el('label', { class: `chip ${tone}` }, box, run.name);
      };
      this.picker.replaceChildren(...runs.filter(Boolean).map(pick));
      this.runs = await Promise.all(this.ids.map(id => ask(`/api/runs/${encodeURIComponent(id)}`)));
      if (view === this) this.draw();
    } catch (error) { link(error.message, 'bad'); }
  }

  draw() {
    for (const [name, chart] of Object.entries(this.charts)) {
      chart.set((this.runs || []).map((run, at) => ({
        name: run.summary.name, tone: TONES[at % TONES.length], x: axis.of(run.series[name]), y: run.series[name].values,
        points: name === 'held_out', clip: true,
      })), { xName: axis.name });
    }
    this.showSettings();
  }

  showSettings() {
    const parsed = (this.runs || []).map(run => {
      const all = new Map(); let section = '';
      for (const line of (run.config || '').split('\n')) {
        const head = line.match(/^\[(.+)\]/), pair = line.match(/^([a-z_]+) = (.*?)( +#.*)?$/);
        if (head) section = head[1];
        else if (pair) all.set(`${section}.${pair[1]}`, pair[2]);
      }
      return all;
    });
    const keys = [...new Set(parsed.flatMap(it => [...it.keys()]))];
    const differing = keys.filter(key => new Set(parsed.map(it => it.get(key))).size > 1);
    const head = el('tr', {}, el('th', {}, 'key'), ...(this.runs || []).map(run => el('th', {}, run.summary.name)));
    const rows = differing.map(key => el('tr', {}, el('td', {}, key), ...parsed.map(it => el('td', {}, it.get(key) ?? '–'))));
    this.settings.replaceChildren(el('h2', {}, 'Settings that differ'), parsed.length < 2
      ? el('p', { class: 'muted' }, 'Choose two runs or more.')
      : el('div', { class: 'scroll' }, el('table', {}, head, ...rows)));
  }
}

class NewView {
  constructor() {
    this.ticket = null;
    const field = (name, label, hint, attributes = {}) => {
      const input = el('input', { name, autocomplete: 'off', spellcheck: 'false', ...attributes, oninput: () => this.stale() });
      return el('label', { class: 'field' }, el('span', {}, label), input, el('small', {}, hint));
    };
    this.recipe = el('select', { name: 'recipe', onchange: () => { this.about(); this.stale(); } });
    this.hint = el('small');
    this.result = el('section', { class: 'panel wide plan', hidden: true });
    this.planButton = el('button', { class: 'accent', type: 'submit' }, 'Plan');
    this.startButton = el('button', { class: 'accent', type: 'button', disabled: true, onclick: () => this.start() }, 'Start');
    this.form = el('form', { class: 'panel wide form', onsubmit: event => { event.preventDefault(); this.plan(); } },
      el('label', { class: 'field full' }, el('span', {}, 'Recipe'), this.recipe, this.hint),
      field('name', 'Name', 'the folder of the run', { required: true, pattern: '[A-Za-z0-9_][A-Za-z0-9._\\-]*', maxlength: 64 }),
      field('steps', 'Steps', 'empty: as the recipe says', { inputmode: 'numeric' }),
      field('base', 'Base model', 'a folder or file on the server; empty: as the recipe says'),
      field('images', 'Images', 'a folder with captions in .txt; empty: as the recipe says'),
      field('text', 'Texts', 'for a language model: a file or folder'),
      el('div', { class: 'row full' }, this.planButton, this.startButton,
        el('small', { class: 'muted' }, 'A run is planned first; only what fits can be started. It goes on when this page is closed.')));
    main.replaceChildren(el('div', { class: 'head' }, el('h1', {}, 'New run')), el('div', { class: 'grid' }, this.form, this.result));
    this.load();
  }

  close() { clearInterval(this.timer); }

  async load() {
    try {
      const { recipes, home } = await ask('/api/jobs');
      this.recipes = recipes;
      this.recipe.replaceChildren(el('option', { value: '' }, 'none: a base model, and images or texts'),
        ...recipes.map(it => el('option', { value: it.recipe }, it.name)));
      if (!home) toast('the server shows single runs and has no folder for new ones', 'bad');
      this.about();
    } catch (error) { toast(error.message, 'bad'); }
  }

  about() { this.hint.textContent = this.recipes?.find(it => String(it.recipe) === this.recipe.value)?.about || ''; }
  stale() { this.ticket = null; this.startButton.disabled = true; }

  async plan() {
    const data = new FormData(this.form);
    const body = { recipe: data.get('recipe') === '' ? null : Number(data.get('recipe')) };
    for (const name of ['name', 'steps', 'base', 'images', 'text']) body[name] = data.get(name);
    this.stale();
    this.planButton.disabled = true;
    this.planButton.textContent = 'Planning …';
    try {
      const { plan, ticket, said, command } = await ask('/api/plan', body);
      this.ticket = ticket;
      this.startButton.disabled = !ticket;
      this.show(plan, said, command);
    } catch (error) { this.show(null, `${error.message}\nhint: ${error.hint || ''}`); }
    this.planButton.disabled = false;
    this.planButton.textContent = 'Plan';
  }

  show(plan, said, command) {
    this.result.hidden = false;
    if (!plan || !plan.fits) {
      this.result.replaceChildren(el('h2', {}, plan ? 'It does not fit' : 'No plan'),
        plan ? el('p', {}, `${plan.phase} needs ${bytes(plan.needed_bytes)}, the limit is ${bytes(plan.limit_bytes)}.`) : '',
        plan?.remedy ? el('p', {}, `Nearest change: ${plan.remedy.change} needs ${bytes(plan.remedy.needed_bytes)}.`) : '',
        said ? el('pre', {}, said.trim()) : '');
      return;
    }
    this.result.replaceChildren(el('h2', {}, 'It fits'),
      el('div', { class: 'facts big' },
        ...[['memory', `${bytes(plan.peak_bytes)} of ${bytes(plan.limit_bytes)}`], ['time', `about ${duration(plan.total_secs)}`],
          ['steps', `${number(plan.times.steps.times)} of ${duration(plan.step_secs)}`], ['device', plan.engine]]
          .map(([label, value]) => el('span', { class: 'fact' }, el('small', {}, label), value))),
      memoryBars(plan.phases.map(it => ({ name: it.name, planned_bytes: it.peak_bytes })), plan.limit_bytes),
      el('p', { class: 'muted' }, Object.entries(plan.chosen).map(([key, value]) => `${key} = ${value}`).join(' · ')),
      el('p', { class: 'muted' }, plan.certainty), el('pre', {}, command));
  }

  async start() {
    try {
      const { name } = await ask('/api/start', { ticket: this.ticket });
      this.stale();
      toast(`${name} is started`);
      this.timer = setInterval(() => this.follow(name), 1000);
    } catch (error) { toast(error.message, 'bad'); }
  }

  async follow(name) {
    const [{ runs }, { started }] = await Promise.all([ask('/api/runs'), ask('/api/jobs')]);
    const over = started.find(it => it.name === name && it.is_over);
    // A short one may be over before it was seen.
    const isSeen = it => it.name === name && (it.state.kind === 'running' || over?.said === null);
    const run = runs.filter(Boolean).find(isSeen);
    if (run && view === this) { clearInterval(this.timer); location.hash = `#/run/${run.id}`; }
    else if (over && over.said !== null) { clearInterval(this.timer); this.show(null, over.said || 'the run is over'); }
  }
}

export function memoryBars(phases, limit) {
  const largest = Math.max(...phases.map(it => Math.max(it.planned_bytes, it.peak_bytes || 0)), 1);
  // A limit far above the plan would leave nothing to see of the bars.
  const isNear = limit && limit < 3 * largest, most = isNear ? Math.max(limit, largest) : largest;
  const rows = phases.map(({ name, planned_bytes, peak_bytes }) => {
    const bar = el('div', { class: 'membar' }, el('i', { class: 'plan' }), el('i', { class: peak_bytes > planned_bytes ? 'peak over' : 'peak' }), el('i', { class: 'limit' }));
    bar.children[0].style.width = `${planned_bytes / most * 100}%`;
    bar.children[1].style.width = `${(peak_bytes || 0) / most * 100}%`;
    bar.children[2].hidden = !isNear;
    bar.children[2].style.left = `calc(${(limit || 0) / most * 100}% - 2px)`;
    const text = peak_bytes == null ? bytes(planned_bytes) : `${bytes(peak_bytes)} of ${bytes(planned_bytes)}`;
    return el('div', { class: 'memrow' }, el('span', {}, name), bar, el('span', { class: 'num' }, text));
  });
  return el('div', { class: 'memory' }, ...rows);
}

function route() {
  view?.close?.();
  document.querySelectorAll('dialog').forEach(it => it.remove());
  const [, page, rest] = location.hash.split('/');
  document.title = 'hearth';
  const at = page === 'compare' || page === 'new' ? page : 'runs';
  document.querySelectorAll('nav a').forEach(it => it.toggleAttribute('aria-current', it.dataset.page === at));
  if (page === 'run') view = new RunView(main, rest);
  else if (page === 'compare') view = new CompareView(rest ? rest.split(',') : [...chosen]);
  else if (page === 'new') view = new NewView();
  else view = new RunsView();
  window.scrollTo(0, 0);
}

function theme(next) {
  const all = ['system', 'light', 'dark'];
  const now = next ? all[(all.indexOf(store.get('theme', 'system')) + 1) % 3] : store.get('theme', 'system');
  store.set('theme', now);
  const isDark = now === 'dark' || now === 'system' && matchMedia('(prefers-color-scheme: dark)').matches;
  document.documentElement.dataset.theme = isDark ? 'dark' : 'light';
  document.getElementById('theme').textContent = { system: '◐', light: '☀', dark: '☾' }[now];
}

function switchAxis(isNext) {
  if (isNext) store.set('axis', axis.isMinutes ? 'steps' : 'minutes');
  document.getElementById('axis').textContent = axis.isMinutes ? 'minutes' : 'steps';
  view?.redraw?.();
}

function help() {
  const keys = [['r', 'all runs'], ['c', 'runs side by side'], ['n', 'new run'], ['m', 'x axis: steps or minutes'], ['t', 'light or dark'],
    ['s', 'in a run: sample now'], ['k', 'in a run: save a checkpoint'], ['p', 'in a run: pause or resume'], ['← →', 'in an image: the step before, after'], ['Esc', 'close']];
  dialog('Keys', [el('dl', { class: 'keys' }, ...keys.flatMap(([key, text]) => [el('dt', {}, el('kbd', {}, key)), el('dd', {}, text)]))]);
}

document.addEventListener('keydown', event => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || document.querySelector('dialog')) return;
  const act = { r: () => { location.hash = '#/'; }, c: () => { location.hash = '#/compare'; }, n: () => { location.hash = '#/new'; },
    m: () => switchAxis(true), t: () => theme(true), '?': help }[event.key];
  if (act) act(); else view?.key?.(event.key);
});
document.getElementById('theme').addEventListener('click', () => theme(true));
document.getElementById('axis').addEventListener('click', () => switchAxis(true));
document.getElementById('help').addEventListener('click', help);
window.addEventListener('hashchange', route);
document.querySelector('.skip').addEventListener('click', event => { event.preventDefault(); main.focus(); });
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => theme(false));
theme(false);
switchAxis(false);
route();
