// One run, live: what the snapshot says, then line by line what the run adds, by server-sent events.

import { Chart, ago, bytes, duration, el, number } from '/chart.js';
import { ask, axis, badge, dialog, isChangeable, link, memoryBars, progress, toast } from '/app.js';

const MOST_POINTS = 6000; // Then the server is asked for a shorter form.
const MOST_LOG = 300;
const REWARDS = ['rewards/chosen', 'rewards/rejected', 'rewards/margins', 'rewards/accuracies', 'frac_reward_zero_std'];
const percent = share => share == null ? '–' : `${Math.round(share * 100)} %`;

export class RunView {
  constructor(main, id) {
    Object.assign(this, { main, id, asked: new Map(), isOpen: true });
    main.replaceChildren(el('p', { class: 'empty' }, 'reading the run …'));
    this.onVisibility = () => (document.hidden ? this.disconnect() : this.connect());
    document.addEventListener('visibilitychange', this.onVisibility);
    this.load();
  }

  close() {
    this.isOpen = false;
    this.disconnect();
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    document.removeEventListener('visibilitychange', this.onVisibility);
    link('', '');
  }

  async load() {
    try {
      const run = await ask(`/api/runs/${encodeURIComponent(this.id)}`);
      if (!this.isOpen) return;
      Object.assign(this, run);
      if (!this.built) this.build();
      this.answers.forEach(it => this.answered(it));
      this.redraw();
      this.lists();
      if (!document.hidden) this.connect();
    } catch (error) {
      if (this.isOpen) this.main.replaceChildren(el('div', { class: 'empty' }, el('h1', {}, error.message), el('a', { href: '#/' }, 'all runs')));
    }
  }

  connect() {
    if (this.source || this.line == null || !this.isOpen) return;
    this.source = new EventSource(`/api/runs/${encodeURIComponent(this.id)}/events?after=${this.line}&epoch=${this.epoch}`);
    this.source.onopen = () => link('live', 'live');
    this.source.onerror = () => link('reconnecting …', 'bad');
    this.source.onmessage = event => { this.line = Number(event.lastEventId); this.take(JSON.parse(event.data)); };
    this.source.addEventListener('summary', event => this.sum(JSON.parse(event.data)));
    this.source.addEventListener('reload', () => { this.disconnect(); this.load(); });
  }

  disconnect() {
    this.source?.close();
    this.source = null;
  }

  take({ record, log }) {
    const { series } = this;
    if (log) { this.log.push(log); if (this.log.length > MOST_LOG) this.log.shift(); this.isLogNew = true; }
    const last = series.loss.minutes.at(-1) || 0;
    const add = (name, value, minutes = last) => {
      if (value == null) return;
      series[name].steps.push(record.step);
      series[name].minutes.push(minutes);
      series[name].values.push(value);
    };
    switch (record.event) {
      case 'begin': this.disconnect(); this.load(); return;
      case 'step': {
        const minutes = last + (record.secs + (record.rest_secs || 0)) / 60;
        add('loss', record.loss ?? NaN, minutes);
        for (const name of ['learning_rate', 'grad_norm', 'peak_bytes']) add(name, record[name], minutes);
        add('step_secs', record.secs, minutes);
        if (series.loss.steps.length > MOST_POINTS) { this.disconnect(); this.load(); return; }
        break;
      }
      case 'validation': add('held_out', record.loss); break;
      case 'telemetry':
        add('process_bytes', record.memory?.held);
        add('celsius', record.temperature?.celsius);
        add('watts', record.watts);
        for (const name of ['duty', 'gpu_utilisation', 'memory_utilisation']) add(name, record[name]);
        break;
      case 'policy':
        for (const name of ['entropy', 'word_ends', 'same_places', 'reward']) add(name, record[name]);
        break;
      case 'rewards':
        for (const name of REWARDS) add(name, record.metrics[name]);
        add('completion_reward', record.metrics.reward);
        break;
      case 'image_sample':
        this.images = this.images.filter(it => it.step !== record.step || it.prompt !== record.prompt || it.seed !== record.seed);
        this.images.push({ file: this.line, step: record.step, prompt: record.prompt, seed: record.seed, has_clip: Boolean(record.clip) });
        this.areSamplesNew = true;
        break;
      case 'text_sample':
        this.texts.push({ line: this.line, step: record.step, prompt: record.prompt, text: record.text });
        this.areSamplesNew = true;
        break;
      case 'warning': case 'left_out': case 'memory_fallback': case 'gpu_lost':
        if (log) this.warnings.unshift({ step: record.step || 0, text: log.text });
        this.areSamplesNew = true;
        break;
      case 'request': this.answered(record); break;
    }
    this.later();
  }

  sum(summary) {
    const { smoothed, loss } = this.series;
    if (summary.loss != null && loss.steps.length && smoothed.steps.at(-1) !== summary.step && summary.step > (smoothed.steps.at(-1) || 0)) {
      smoothed.steps.push(summary.step);
      smoothed.minutes.push(loss.minutes.at(-1));
      smoothed.values.push(summary.loss);
    }
    this.summary = summary;
    this.later();
  }

  // At most twice a second, and only while somebody looks.
  later() {
    if (this.timer) return;
    this.timer = setTimeout(() => {
      this.timer = null;
      this.frame = requestAnimationFrame(() => {
        if (!this.isOpen) return;
        this.redraw();
        if (this.areSamplesNew || this.isLogNew) this.lists();
      });
    }, 500);
  }

  build() {
    this.built = true;
    const panel = (title, kind = '', ...more) => el('section', { class: `panel ${kind}` }, el('h2', {}, title, ...more));
    this.panels = {};
    const part = (name, ...args) => (this.panels[name] = panel(...args));
    const log = el('label', { class: 'switch' }, el('input', { type: 'checkbox', onchange: event => { this.isLog = event.target.checked; this.redraw(); } }), 'log scale');
    this.charts = {
      loss: new Chart(part('loss', 'Loss', 'wide', log), { height: 260, legend: true, label: 'loss', none: 'no step yet' }),
      speed: new Chart(part('speed', 'Seconds per step'), { format: duration, zero: true, label: 'seconds per step' }),
      optim: new Chart(part('optim', 'Gradient norm'), { label: 'gradient norm' }),
      rate: new Chart(part('rate', 'Learning rate'), { label: 'learning rate', zero: true }),
    };
    part('memory', 'Memory: peak of each phase against the plan');
    this.memoryBox = el('div');
    this.panels.memory.append(this.memoryBox);
    this.charts.memory = new Chart(this.panels.memory, { format: bytes, height: 120, zero: true, label: 'memory over time', none: 'no reading of memory yet' });
    part('device', 'Heat, power, pace');
    this.deviceFacts = el('div', { class: 'facts' });
    this.panels.device.append(this.deviceFacts);
    this.charts.heat = new Chart(this.panels.device, { height: 110, format: it => `${number(it, 3)} °C`, label: 'temperature', none: 'no thermometer here' });
    this.charts.power = new Chart(this.panels.device, { height: 90, format: it => `${number(it, 3)} W`, zero: true, label: 'power', none: 'no power meter here' });
    this.charts.busy = new Chart(this.panels.device, { height: 90, format: percent, zero: true, legend: true, label: 'utilisation' });
    this.charts.policy = new Chart(part('policy', 'Policy: what it keeps'), { format: percent, zero: true, legend: true, label: 'policy' });
    this.charts.reward = new Chart(this.panels.policy, { height: 110, label: 'reward' });
    this.charts.rewards = new Chart(part('rewards', 'Rewards'), { legend: true, label: 'rewards' });
    this.charts.accuracy = new Chart(this.panels.rewards, { format: percent, height: 110, zero: true, label: 'accuracy' });
    for (const [name, title, kind] of [['gallery', 'Samples', 'wide'], ['texts', 'Texts', 'wide'], ['health', 'Health', ''], ['nodes', 'Nodes', 'wide'], ['settings', 'Settings and plan', 'wide'], ['log', 'Log', 'wide']]) part(name, title, kind);
    this.head = el('div', { class: 'head' });
    this.hero = el('section', { class: 'panel wide hero' });
    this.buttons = this.actions();
    this.main.replaceChildren(this.head, el('div', { class: 'grid' }, this.hero,
      ...['loss', 'gallery', 'texts', 'speed', 'memory', 'device', 'policy', 'rewards', 'health', 'optim', 'rate', 'nodes', 'log', 'settings'].map(name => this.panels[name])));
  }

  actions() {
    const button = (text, act, tone, title) => el('button', { class: tone, onclick: act, title }, text);
    this.pauseButton = button('Pause', () => this.pause(), 'quiet', 'pause or resume (p)');
    return el('div', { class: 'row actions' }, button('Sample now', () => this.sample(), 'accent', 'sample now (s)'),
      button('Save', () => this.send({ request: 'save' }), 'quiet', 'save a checkpoint (k)'), this.pauseButton,
      button('Change', () => this.change(), 'quiet', 'settings that may change while a run works'),
      button('Stop', () => this.stop(), 'danger', 'save and end'));
  }

  key(key) {
    if (!this.isActive() || !isChangeable) return;
    ({ s: () => this.sample(), k: () => this.send({ request: 'save' }), p: () => this.pause() })[key]?.();
  }

  isActive() { return ['running', 'paused'].includes(this.summary?.state.kind); }
  pause() { this.send({ request: this.summary.state.kind === 'paused' ? 'resume' : 'pause' }); }

  sample() {
    const input = el('input', { placeholder: 'one more prompt, or none', maxlength: 2000, 'aria-label': 'prompt' });
    const send = () => this.send(input.value.trim() ? { request: 'sample', prompt: input.value.trim() } : { request: 'sample' });
    const box = dialog('Sample now', [el('p', {}, 'All prompts of the run are sampled after the step at hand. What is learnt stays the same.'), input],
      [{ text: 'Sample', tone: 'accent', act: send }]);
    input.addEventListener('keydown', event => { if (event.key === 'Enter') box.querySelector('button.accent').click(); });
    input.focus();
  }

  // A field for each setting that may change; every answer of the run stands below its field.
  change() {
    const prompts = text => text.split('\n').filter(it => it.trim()).map(it => it.replaceAll('\\n', '\n'));
    const rows = this.changeable.map(({ key, value, accepted }) => {
      const isList = Array.isArray(value), choices = accepted.split('one of ')[1]?.split(', '), said = el('small', {}, isList ? `${accepted}; one per line, \\n is a line break in it` : accepted);
      const field = choices ? el('select', {}, ...choices.map(it => el('option', {}, it))) : el(isList ? 'textarea' : 'input', { rows: isList && 5 });
      field.name = key;
      field.value = isList ? value.map(it => it.replaceAll('\n', '\\n')).join('\n') : value;
      return { key, field, said, was: field.value, value: () => (isList ? JSON.stringify(prompts(field.value)) : field.value.trim()) };
    });
    const changed = () => rows.filter(it => it.field.value !== it.was);
    const answer = (row, asked, refused) => {
      if (!refused) row.was = asked;
      row.said.textContent = refused ? `refused: ${refused}` : 'changed';
      row.said.className = refused ? 'bad' : 'good';
      if (!box.isConnected || !changed().length) toast(refused ? `${row.key} stays: ${refused}` : `${row.key} is changed`, refused ? 'bad' : '');
      if (!changed().length) box.close();
    };
    const send = () => changed().map(row => {
      const asked = row.field.value;
      row.said.textContent = 'asked …';
      this.send({ request: 'change', key: row.key, value: row.value() }, refused => answer(row, asked, refused));
    }).length > 0;
    const box = dialog('Change settings', [el('p', {}, 'The run saves, plans with the new values and goes on. What is learnt stays the same.'),
      ...rows.map(({ key, field, said }) => el('label', { class: 'field' }, el('span', {}, key), field, said))], [{ text: 'Change', tone: 'accent', act: send }]);
  }

  stop() {
    dialog('Stop this run?', [el('p', {}, `${this.summary.name} saves a checkpoint and ends. --resume continues it bit for bit.`)],
      [{ text: 'Stop the run', tone: 'danger', act: () => this.send({ request: 'stop' }) }]);
  }

  async send(request, answer = refused => this.tell(request.request, refused)) {
    try {
      const { id } = await ask(`/api/runs/${encodeURIComponent(this.id)}/requests`, request);
      this.asked.set(id, answer);
      if (request.request !== 'change') toast(`asked the run to ${request.request}`);
    } catch (error) { answer(error.message); }
  }

  answered({ id, refused }) {
    const answer = this.asked.get(id);
    this.asked.delete(id);
    answer?.(refused);
  }

  tell(what, refused) {
    if (refused) toast(`${what} was refused: ${refused}`, 'bad');
    else toast({ sample: 'samples are done', save: 'the checkpoint is saved', pause: 'the run stands still', resume: 'the run goes on', stop: 'the run saves and ends' }[what]);
  }

  redraw() {
    if (!this.summary || !this.built) return;
    const { summary, series } = this;
    document.title = `${summary.steps ? `${Math.floor(summary.step / summary.steps * 100)} % ` : ''}${summary.name} – hearth`;
    this.drawHead();
    const line = (name, label, tone, more = {}) => ({ name: label, tone, x: axis.of(series[name]), y: series[name].values, ...more });
    const xName = axis.name;
    this.charts.loss.set([line('loss', 'loss', 'ember', { thin: true, clip: true }), line('smoothed', `mean of ${summary.loss_window}`, 'ember strong'),
      line('held_out', 'held-out', 'teal', { points: true })], { log: this.isLog, xName });
    const planned = summary.planned_step_secs ? [{ y: summary.planned_step_secs, text: 'plan', tone: 'teal' }] : [];
    this.charts.speed.set([line('step_secs', 'step', 'ember', { clip: true })], { marks: planned, xName });
    this.charts.optim.set([line('grad_norm', 'gradient norm', 'violet', { clip: true })], { xName });
    this.charts.rate.set([line('learning_rate', 'learning rate', 'green')], { xName });
    this.charts.memory.set([line('peak_bytes', 'tensors, peak of a step', 'ember'), line('process_bytes', 'whole process', 'teal')],
      { marks: summary.memory ? [{ y: summary.memory.limit_bytes, text: 'limit', tone: 'bad' }] : [], xName });
    const heat = summary.device.telemetry?.temperature;
    this.charts.heat.set([line('celsius', 'temperature', 'rose')], { marks: heat?.limit ? [{ y: heat.limit, text: 'limit', tone: 'bad', inside: true }] : [], xName });
    this.charts.power.set([line('watts', 'power', 'gold')], { xName });
    this.charts.busy.set([line('gpu_utilisation', 'GPU', 'teal'), line('memory_utilisation', 'its memory', 'violet')], { xName });
    this.charts.busy.plot.hidden = !series.gpu_utilisation.values.length;
    this.panels.policy.hidden = !series.entropy.values.length;
    this.charts.policy.set([line('entropy', 'entropy, of the largest', 'ember'), line('word_ends', 'ends of words', 'teal'), line('same_places', 'same places', 'violet')], { xName });
    const isOfCompletions = series.completion_reward.values.length > 0;
    this.panels.rewards.hidden = !isOfCompletions && !series['rewards/chosen'].values.length;
    this.charts.rewards.set(isOfCompletions
      ? [line('completion_reward', 'of completions', 'green')]
      : [line('rewards/chosen', 'chosen', 'green'), line('rewards/rejected', 'rejected', 'rose'), line('rewards/margins', 'margins', 'teal')], { xName });
    this.charts.accuracy.set(isOfCompletions
      ? [line('frac_reward_zero_std', 'all of a prompt equal', 'violet')]
      : [line('rewards/accuracies', 'accuracies', 'violet')], { xName });
    this.charts.reward.set([line('reward', 'mean reward', 'green')], { xName });
    this.memoryBox.replaceChildren(summary.memory ? memoryBars(summary.memory.phases, summary.memory.limit_bytes) : '');
    this.drawDevice();
    this.drawHealth();
    this.drawNodes();
  }

  drawHead() {
    const { summary } = this;
    const facts = el('small', { class: 'muted' }, [this.begin?.base.split('/').filter(Boolean).at(-1), summary.device.engine].filter(Boolean).join(' on '));
    if (!this.title) {
      this.title = el('h1', {}, summary.name);
      this.place = el('div', { class: 'under' });
      this.head.append(el('div', {}, this.title, this.place), el('span', { class: 'grow' }), this.buttons);
    }
    this.place.replaceChildren(badge(summary.state), facts);
    this.buttons.hidden = !this.isActive() || !isChangeable;
    this.pauseButton.textContent = summary.state.kind === 'paused' ? 'Resume' : 'Pause';
    const big = (label, value, more) => el('div', { class: 'big' }, el('small', {}, label), el('b', {}, value), el('small', { class: 'muted' }, more || ''));
    const share = summary.steps ? summary.step / summary.steps : 0;
    const state = summary.state;
    const work = summary.progress && this.isActive() ? summary.progress : null;
    const counted = work?.total ? (work.unit === 'bytes' ? `${bytes(work.done)} of ${bytes(work.total)}` : `${work.done} of ${work.total}`) : '';
    this.hero.replaceChildren(progress(summary), el('div', { class: 'bigs' },
      big('step', summary.steps ? number(summary.step) : '–', summary.steps ? `of ${number(summary.steps)}, ${Math.floor(share * 100)} %` : work ? `${work.phase} ${counted}` : ''),
      this.isActive() ? big('left', duration(summary.eta_secs), summary.eta_secs ? `ends ${new Date(Date.now() + summary.eta_secs * 1000).toLocaleString([], { weekday: summary.eta_secs > 43200 ? 'short' : undefined, hour: '2-digit', minute: '2-digit' })}` : '')
        : big('took', duration(summary.secs + summary.rest_secs), `last event ${ago(summary.time)}`),
      big('loss', number(summary.loss), `mean of ${summary.loss_window} steps`),
      big('held-out', number(summary.validation?.loss), summary.best_validation ? `best ${number(summary.best_validation.loss)} at ${summary.best_validation.step}` : 'nothing held out'),
      big('per step', duration(summary.step_secs), summary.planned_step_secs ? `planned ${duration(summary.planned_step_secs)}` : ''),
      big('memory', bytes(summary.memory?.peak_bytes), summary.memory ? `limit ${bytes(summary.memory.limit_bytes)}` : '')));
    if (work && summary.steps) this.hero.append(el('p', { class: 'muted' }, `${work.phase} ${counted}`));
    if (state.kind === 'failed') this.hero.append(el('p', { class: 'bad' }, state.text), el('p', { class: 'muted' }, `hint: ${state.hint}`));
    if (state.kind === 'killed') this.hero.append(el('p', { class: 'bad' }, 'The program is gone and said nothing: it was killed, or the computer went off. --resume continues from the last checkpoint.'));
    if (summary.problem) this.hero.append(el('p', { class: 'bad' }, summary.problem));
  }

  drawDevice() {
    const { device, rest_secs, secs, pace } = this.summary;
    const telemetry = device.telemetry || {};
    const fact = (label, value) => el('span', { class: 'fact' }, el('small', {}, label), value);
    this.deviceFacts.replaceChildren(fact('device', device.engine || '–'),
      ...[telemetry.temperature && ['sensor', `${telemetry.temperature.sensor} ${number(telemetry.temperature.celsius, 3)} °C`],
        telemetry.watts != null && ['power', `${number(telemetry.watts, 3)} W`], device.joules && ['energy', device.joules > 36e5 ? `${number(device.joules / 3.6e6, 3)} kWh` : `${number(device.joules / 1000, 3)} kJ`],
        device.duty != null && ['pace', `${Math.round(device.duty * 100)} %`], rest_secs > 0 && ['rest', `${duration(rest_secs)} (${Math.round(rest_secs / (secs + rest_secs) * 100)} %)`],
        telemetry.gpu_utilisation != null && ['GPU', `${percent(telemetry.gpu_utilisation)}, its memory ${percent(telemetry.memory_utilisation)}`],
        telemetry.throttled && ['throttled by', telemetry.throttled], telemetry.on_battery && ['power from', 'battery'],
        telemetry.memory_stall != null && ['memory stall', `${number(telemetry.memory_stall * 100, 2)} %`]].filter(Boolean).map(([label, value]) => fact(label, value)),
      pace ? el('p', { class: 'muted' }, `step ${pace.step}: ${pace.text}`) : '');
  }

  drawHealth() {
    const { health, not_finite, checkpoint, wait_secs, copy_wait_secs, secs, grad_norm } = this.summary;
    const row = (label, value, isBad) => el('div', { class: `check ${isBad ? 'bad' : 'good'}` }, el('i'), el('span', {}, label), el('b', {}, value));
    const title = this.panels.health.firstChild;
    this.panels.health.replaceChildren(title,
      row('steps not finite', String(not_finite), not_finite > 0),
      row('waiting for data', secs ? `${Math.round(wait_secs / secs * 100)} %` : '–', secs && wait_secs / secs > 0.2),
      copy_wait_secs ? row('waiting for copies', percent(copy_wait_secs / secs), copy_wait_secs / secs > 0.2) : '',
      row('gradient norm', number(grad_norm), false),
      health ? row('loss over 100 steps', `${number(health.loss)} ± ${number(health.spread, 2)}`, health.trend > 0.2) : '',
      row('last checkpoint', checkpoint ? `step ${checkpoint.step}, ${ago(checkpoint.time)}` : 'none yet', false),
      ...this.warnings.slice(0, 12).map(({ step, text }) => el('p', { class: 'warning' }, el('small', {}, `step ${step}`), text)),
      this.warnings.length ? '' : el('p', { class: 'muted' }, 'no warnings'));
  }

  drawNodes() {
    const { ranks } = this.summary;
    this.panels.nodes.hidden = ranks.length < 2;
    if (ranks.length < 2) return;
    const cells = it => [it.node, it.device, String(it.samples), duration(it.compute_secs), duration(it.wait_secs), duration(it.exchange_secs), it.celsius == null ? '–' : `${Math.round(it.celsius)} °C`];
    const row = (tag, all) => el('tr', {}, ...all.map(it => el(tag, {}, it)));
    this.panels.nodes.replaceChildren(this.panels.nodes.firstChild, el('div', { class: 'scroll' }, el('table', {},
      row('th', ['node', 'device', 'samples per step', 'computes', 'waits', 'exchanges', 'heat']), ...ranks.map(it => row('td', cells(it))))));
  }

  lists() {
    this.areSamplesNew = this.isLogNew = false;
    this.drawGallery();
    this.drawTexts();
    const log = el('ol', { class: 'log', tabindex: 0 }, ...this.log.slice().reverse().map(({ time, level, text }) => el('li', { class: level },
      el('time', {}, time ? new Date(time * 1000).toLocaleTimeString() : ''), text)));
    this.panels.log.replaceChildren(this.panels.log.firstChild, log);
    const { begin } = this;
    const fact = (label, value) => el('span', { class: 'fact' }, el('small', {}, label), value);
    this.panels.settings.replaceChildren(this.panels.settings.firstChild, begin ? el('div', { class: 'facts' },
      fact('folder', this.summary.folder), fact('base', begin.base), fact('device', begin.engine), fact(`${begin.unit}s`, `${number(begin.samples)}, ${begin.held_out} held out`),
      fact('trained', `${number(begin.parameters)} parameters in ${begin.layers} layers`), fact('per step', `${begin.samples_per_step}`),
      fact('plan', begin.settings || '–'), fact('hearth', begin.version)) : '',
    this.config ? el('details', {}, el('summary', {}, 'the job as decided, with the origin of every value'), el('pre', {}, this.config)) : '');
  }

  url(image, isClip) { return `/api/runs/${encodeURIComponent(this.id)}/files/${image.file}${isClip ? '/clip' : ''}`; }

  drawGallery() {
    this.panels.gallery.hidden = !this.images.length;
    if (!this.images.length) return;
    const steps = [...new Set(this.images.map(it => it.step))].sort((a, b) => a - b);
    const prompts = [...new Set(this.images.map(it => it.prompt))];
    const place = this.gallery?.scrollLeft, isEnd = !this.gallery || this.gallery.scrollLeft + this.gallery.clientWidth > this.gallery.scrollWidth - 40;
    const table = el('table', { class: 'gallery' }, el('tr', {}, el('th', {}), ...steps.map(step => el('th', {}, step ? `step ${number(step)}` : 'base'))),
      ...prompts.map(prompt => el('tr', {}, el('th', { title: prompt }, el('span', {}, prompt)), ...steps.map(step => {
        const image = this.images.find(it => it.step === step && it.prompt === prompt);
        return el('td', {}, image ? el('button', { class: 'thumb', 'aria-label': `${prompt}, step ${step}`, onclick: () => this.show(image) },
          el('img', { src: this.url(image), alt: '', loading: 'lazy' })) : '');
      }))));
    this.gallery = el('div', { class: 'scroll' }, table);
    this.panels.gallery.replaceChildren(this.panels.gallery.firstChild, this.gallery);
    this.gallery.scrollLeft = isEnd ? this.gallery.scrollWidth : place;
  }

  // An image over the whole window; with the slider, beside that of another step.
  show(image) {
    const same = this.images.filter(it => it.prompt === image.prompt).sort((a, b) => a.step - b.step);
    let at = same.indexOf(image), other = 0;
    const box = el('dialog', { class: 'full', 'aria-label': image.prompt });
    const front = el('img', { alt: '' }), back = el('img', { alt: '', class: 'back' });
    const video = el('video', { controls: true, loop: true, hidden: true });
    const slider = el('input', { type: 'range', min: 0, max: 1000, value: 500, 'aria-label': 'how much of each is shown' });
    const cut = el('i', { class: 'cut' });
    const left = el('select', { 'aria-label': 'left' }), right = el('select', { 'aria-label': 'right' });
    for (const [n, it] of same.entries()) for (const list of [left, right]) list.append(el('option', { value: n }, it.step ? `step ${it.step}` : 'base'));
    const draw = () => {
      back.src = this.url(same[other]);
      front.src = this.url(same[at]);
      [left.value, right.value] = [other, at];
      const share = slider.value / 10;
      front.style.clipPath = same.length > 1 ? `inset(0 0 0 ${share}%)` : '';
      cut.style.left = `${share}%`;
      cut.hidden = slider.hidden = same.length < 2;
      video.hidden = !same[at].has_clip;
      if (same[at].has_clip && !video.src.endsWith(this.url(same[at], true))) video.src = this.url(same[at], true);
    };
    const move = by => { at = Math.max(0, Math.min(same.length - 1, at + by)); draw(); };
    slider.addEventListener('input', draw);
    left.addEventListener('change', () => { other = Number(left.value); draw(); });
    right.addEventListener('change', () => { at = Number(right.value); draw(); });
    const frame = el('div', { class: 'frame' }, back, front, cut, slider);
    box.append(el('div', { class: 'row' }, el('b', {}, image.prompt), el('span', { class: 'grow' }), left, '|', right, el('button', { class: 'quiet', onclick: () => box.close() }, 'Close')), frame, video);
    box.addEventListener('keydown', event => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (by && event.target !== slider) { event.preventDefault(); move(by); }
    });
    box.addEventListener('close', () => box.remove());
    box.addEventListener('click', event => { if (event.target === box) box.close(); });
    document.body.append(box);
    if (same.length < 2) slider.value = 0; else if (!at) at = same.length - 1;
    draw();
    box.showModal();
    box.querySelector('button').focus();
  }

  drawTexts() {
    this.panels.texts.hidden = !this.texts.length;
    const item = ({ step, prompt, text }) => el('article', { class: 'sampletext' }, el('small', {}, step ? `step ${number(step)}` : 'base'), el('p', {}, el('em', {}, prompt), text));
    this.panels.texts.replaceChildren(this.panels.texts.firstChild, el('div', { class: 'texts' }, ...this.texts.slice(-30).reverse().map(item)));
  }
}
