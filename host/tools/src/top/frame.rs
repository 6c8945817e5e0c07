//! Draws a frame.

use pointsman_admin_cli::{
    api::{Slot, Worker},
    digests, quantiles, requests,
    text::{NONE, bytes, clean, cut, millis, percent},
    trial_rows,
    worker_name::{address, is_hash, with_addresses},
};
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Borders, Cell, Clear, Paragraph, Row, Table, TableState},
};

use super::model::{Model, View};

/// Keys and what they do, and the columns that need a word.
const HELP: [(&str, &str); 8] = [
    ("q, Ctrl-C", "quit"),
    ("s", "sort by name, active requests, queue, KV usage, TTFT"),
    ("/", "filter workers by id, role, engine, state, URL or model; Enter ends, Esc clears"),
    ("up, down", "select a worker"),
    ("d", "drain the selected worker, or end its drain; y confirms"),
    ("p, space", "pause and continue"),
    ("h, ?", "this help"),
    ("HITS", "share of the newest requests' prompt tokens that was in the worker's cache"),
];
/// Columns of the keys.
const KEYS: usize = 12;
/// Columns of a slot's state.
const STATE: usize = 12;
/// Columns of a table, with their heads.
type Columns = [(&'static str, u16)];
const WORKER_COLUMNS: [(&str, u16); 9] = [
    ("WORKER", 12),
    ("ROLE", 10),
    ("STATE", 11),
    ("ACTIVE", 6),
    ("QUEUE", 5),
    ("KV", 5),
    ("HITS", 5),
    ("TTFT", 7),
    ("ITL", 7),
];

/// Draws the whole screen.
pub(super) fn draw(frame: &mut Frame<'_>, newest: &Model, view: &View) {
    let model = view.paused.as_deref().unwrap_or(newest);
    let slots: usize = model.slots.iter().map(|slot| 1 + trial_rows(slot).len()).sum();
    let slots = u16::try_from(slots).unwrap_or(u16::MAX).clamp(1, 8) + 2;
    let areas = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(5),
        Constraint::Min(4),
        Constraint::Length(slots),
        Constraint::Length(1),
    ]);
    let [title, load, workers, slots, foot] = areas.areas(frame.area());
    frame.render_widget(head(newest, view), title);
    frame.render_widget(Paragraph::new(figures(model)), load);
    draw_workers(frame, workers, model, view);
    frame.render_widget(slot_table(model, slots.width), slots);
    frame.render_widget(footer(newest, view), foot);
    if view.help {
        help(frame);
    }
}

fn head(model: &Model, view: &View) -> Line<'static> {
    let name = format!("pointsman {} ", clean(&model.version));
    let place = format!("{} ", clean(&model.url));
    let red = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
    let state = match (&model.lost, &view.paused) {
        (Some((since, why)), _) => {
            Span::styled(format!("LOST the gateway since {since}: {}", clean(why)), red)
        }
        (None, Some(_)) => Span::styled("paused", Style::new().fg(Color::Yellow)),
        (None, None) if model.not_ready => Span::styled(format!("live, not ready{}", problem(model)), red),
        (None, None) if !model.reasons.is_empty() => {
            Span::styled(format!("live{}", problem(model)), Style::new().fg(Color::Yellow))
        }
        (None, None) => Span::styled("live", Style::new().fg(Color::Green)),
    };
    // A problem comes first, because the end may be cut at 80 columns.
    Line::from(vec![
        Span::styled(name, Style::new().add_modifier(Modifier::BOLD)),
        state,
        Span::raw("  "),
        Span::raw(place),
    ])
}

/// The first reason why something is wrong with the gateway, and how many others there are.
fn problem(model: &Model) -> String {
    let Some((first, others)) = model.reasons.split_first() else { return String::new() };
    let first = with_addresses(&clean(first), &model.workers);
    if others.is_empty() { format!(": {first}") } else { format!(" (1 of {}): {first}", others.len() + 1) }
}

fn figures(model: &Model) -> Vec<Line<'static>> {
    let live = &model.live;
    let eligible = model.workers.iter().filter(|worker| worker.ineligible.is_none()).count();
    vec![
        Line::from(format!("requests  {}", requests(live))),
        Line::from(format!(
            "TTFT      {}",
            quantiles([live.ttft_p50_ms, live.ttft_p90_ms, live.ttft_p99_ms])
        )),
        Line::from(format!("ITL       {}", quantiles([live.itl_p50_ms, live.itl_p90_ms, live.itl_p99_ms]))),
        Line::from(format!(
            "queue     {} waiting, {}; session bindings: {}, connections: {}",
            live.queue.waiting,
            bytes(live.queue.waiting_bytes),
            live.session_bindings,
            live.connections
        )),
        Line::from(format!("workers   {eligible} of {} eligible", model.workers.len())),
    ]
}

fn draw_workers(frame: &mut Frame<'_>, area: Rect, model: &Model, view: &View) {
    let rows = view.rows(model);
    let filter = if view.filter.is_empty() && !view.typing {
        String::new()
    } else {
        format!(", filter `{}{}`", view.filter, if view.typing { "_" } else { "" })
    };
    let title = format!(" workers by {}{filter} ", view.sort.name());
    let columns = columns_of(&WORKER_COLUMNS, area.width);
    let header = Row::new(columns.iter().map(|(name, _)| *name));
    let others: u16 = columns.iter().skip(1).map(|(_, width)| width + 1).sum();
    let room = usize::from(area.width.saturating_sub(others).max(12));
    let width = |(place, (_, width)): (usize, &(_, u16))| {
        if place == 0 { Constraint::Min(*width) } else { Constraint::Length(*width) }
    };
    let widths = columns.iter().enumerate().map(width);
    let table = Table::new(rows.iter().map(|worker| worker_row(worker, model, room)), widths)
        .header(header.style(Style::new().add_modifier(Modifier::BOLD)))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
        .block(Block::new().borders(Borders::TOP).title(title));
    let selected = (!rows.is_empty()).then(|| view.selected.min(rows.len() - 1));
    frame.render_stateful_widget(table, area, &mut TableState::new().with_selected(selected));
}

/// Returns the first columns, as many as fit `width` whole, with a space between them.
fn columns_of(all: &Columns, width: u16) -> &Columns {
    let mut end = 0;
    let fits = |(_, wide): &&(&str, u16)| {
        end += wide + 1;
        end <= width + 1
    };
    let count = all.iter().take_while(fits).count();
    all.get(..count.max(1)).unwrap_or(all)
}

fn worker_row(worker: &Worker, model: &Model, room: usize) -> Row<'static> {
    let load = worker.engine_load.as_ref();
    let hits = model.prefix_hits.get(&worker.id).filter(|(_, all)| *all > 0.0);
    let hits = hits.map(|(cached, all)| cached / all);
    let colour = match worker.state() {
        "eligible" => Color::Green,
        "draining" | "at_capacity" | "paused" => Color::Yellow,
        _ => Color::Red,
    };
    Row::new(vec![
        Cell::from(safe(&worker_name(worker, room))),
        Cell::from(safe(&worker.spec.role)),
        Cell::from(safe(worker.state())).style(Style::new().fg(colour)),
        Cell::from(worker.active().to_string()),
        Cell::from(load.and_then(|load| load.waiting).map_or(NONE.to_owned(), |waiting| waiting.to_string())),
        Cell::from(percent(load.and_then(|load| load.kv_usage))),
        Cell::from(percent(hits)),
        Cell::from(millis(worker.ttft_ms())),
        Cell::from(millis(worker.itl_ms())),
    ])
}

/// The id and the address of a worker; a long id is a hash of the URL, which says more. An address that is
/// too long for `room` columns loses its beginning, because the end tells workers apart.
fn worker_name(worker: &Worker, room: usize) -> String {
    let id = worker.id.to_string();
    let id = if is_hash(&id) { String::new() } else { format!("{id} ") };
    let address = address(worker);
    let room = room.saturating_sub(id.len());
    let over = address.chars().count().saturating_sub(room);
    match address.char_indices().nth(over + 1).filter(|_| over > 0) {
        Some((start, _)) => format!("{id}…{}", address.get(start..).unwrap_or_default()),
        None => format!("{id}{address}"),
    }
}

/// The slots, and a row for each of their trials. Where the columns do not fit, the digests are left out.
fn slot_table(model: &Model, width: u16) -> Table<'static> {
    let width = usize::from(width);
    let is_wide = width >= 67;
    let (slot, least) = if is_wide { (20, 12) } else { (15, 0) };
    // What the other columns leave, with a space between them.
    let room = width.saturating_sub(slot + least + STATE + 3).max(10);
    let policy = model.slots.iter().map(policy_columns).max().unwrap_or(0).clamp(10, room);
    let room_of_digests = width.saturating_sub(slot + policy + STATE + 3).max(least);
    let digests = if is_wide { digest_columns(&model.slots, room_of_digests) } else { 0 };
    let widths = [slot, policy, digests, STATE];
    let widths = widths.map(|columns| Constraint::Length(u16::try_from(columns).unwrap_or(u16::MAX)));
    let rows = model.slots.iter().flat_map(|slot| slot_rows(slot, policy, digests));
    Table::new(rows, widths)
        .header(
            Row::new(["SLOT", "POLICY", "DIGEST", "STATE"]).style(Style::new().add_modifier(Modifier::BOLD)),
        )
        .block(Block::new().borders(Borders::TOP).title(" slots "))
}

/// Columns of the longest policy of a slot with its generation.
fn policy_columns(slot: &Slot) -> usize {
    let columns = |policy: &str, generation| clean(policy).chars().count() + format!("@{generation}").len();
    let trials = trial_rows(slot).into_iter().map(|(_, trial, _)| columns(&trial.policy, trial.generation));
    trials.chain([columns(&slot.policy, slot.generation)]).max().unwrap_or(0)
}

/// Columns of the longest list of digests, at most `room`.
fn digest_columns(slots: &[Slot], room: usize) -> usize {
    let whole = slots.iter().map(|slot| digests(slot.digest.as_deref(), &slot.parts, usize::MAX).len());
    whole.max().unwrap_or(0).clamp(12, room)
}

/// A slot and its trials. A long name of a policy loses its end, and not its generation, so that both fit
/// `room` columns.
fn slot_rows(slot: &Slot, room: usize, columns: usize) -> Vec<Row<'static>> {
    let name = match &slot.model {
        Some(model) => format!("{} {model}", slot.slot),
        None => slot.slot.clone(),
    };
    let row = |name: &str, (policy, generation): (&str, u64), digests: &str, state: &str, is_open| {
        let generation = format!("@{generation}");
        let colour = if is_open { Color::Red } else { Color::Reset };
        Row::new(vec![
            Cell::from(safe(name)),
            Cell::from(format!("{}{generation}", cut(&clean(policy), room - generation.len().min(room)))),
            Cell::from(safe(digests)),
            Cell::from(safe(state)).style(Style::new().fg(colour)),
        ])
    };
    let state = if slot.breaker_open { "breaker open" } else { &slot.state };
    let own = digests(slot.digest.as_deref(), &slot.parts, columns);
    let mut rows = vec![row(&name, (&slot.policy, slot.generation), &own, state, slot.breaker_open)];
    rows.extend(trial_rows(slot).into_iter().map(|(lane, trial, state)| {
        let own = digests(trial.digest.as_deref(), &trial.parts, columns);
        row(&lane, (&trial.policy, trial.generation), &own, &state, trial.breaker_open)
    }));
    rows
}

fn footer(model: &Model, view: &View) -> Line<'static> {
    if let Some(change) = view.confirm {
        let what = if change.undo { "end the drain of" } else { "drain" };
        let text = format!("{what} worker {}? y confirms, any other key does not", change.worker);
        return Line::styled(text, Style::new().fg(Color::Yellow).add_modifier(Modifier::BOLD));
    }
    match &model.message {
        Some(message) => Line::raw(safe(message)),
        None => Line::raw("q quit  s sort  / filter  d drain  p pause  h help"),
    }
}

fn help(frame: &mut Frame<'_>) {
    let area = frame.area();
    let room = usize::from(area.width).saturating_sub(KEYS + 2).max(10);
    let entry = |(key, text): &(&str, &str)| {
        let lines = wrapped(text, room).into_iter().enumerate();
        let line = |(place, text)| format!("{:<KEYS$}{text}", if place == 0 { *key } else { "" });
        lines.map(line).map(Line::raw).collect::<Vec<_>>()
    };
    let lines: Vec<Line<'_>> = HELP.iter().flat_map(entry).collect();
    let height = u16::try_from(lines.len()).unwrap_or(u16::MAX).saturating_add(2).min(area.height);
    let [area] = Layout::vertical([Constraint::Length(height)]).areas(area);
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(" help ")), area);
}

/// Breaks a text between words into lines of at most `columns`.
fn wrapped(text: &str, columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut().filter(|line| line.len() + 1 + word.len() <= columns) {
            Some(line) => line.extend([" ", word]),
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Text of the gateway, made safe for the terminal.
fn safe(text: &str) -> String {
    cut(&clean(text), 120)
}
