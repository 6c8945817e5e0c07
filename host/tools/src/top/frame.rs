//! Draws a frame.

use pointsman_admin_cli::{
    api::{Slot, Worker},
    digests, quantiles, requests,
    text::{NONE, bytes, clean, cut, millis, percent},
    trials,
};
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Borders, Cell, Clear, Paragraph, Row, Table, TableState},
};

use super::model::{Model, View};

const HELP: [&str; 9] = [
    "q, Ctrl-C   quit",
    "s           sort by id, active requests, queue, KV usage, TTFT",
    "/           filter workers by id, role, engine, state, URL or model; Enter ends, Esc clears",
    "up, down    select a worker",
    "d           drain the selected worker, or end its drain; y confirms",
    "p, space    pause and continue",
    "h, ?        this help",
    "",
    "HITS: share of the newest requests' prompt tokens that was in the worker's cache",
];

/// Draws the whole screen.
pub(super) fn draw(frame: &mut Frame<'_>, newest: &Model, view: &View) {
    let model = view.paused.as_deref().unwrap_or(newest);
    let slots = u16::try_from(model.slots.len()).unwrap_or(u16::MAX).clamp(1, 6) + 2;
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
    let state = match (&model.lost, &view.paused) {
        (Some((since, why)), _) => Span::styled(
            format!("LOST the gateway since {since}: {}", clean(why)),
            Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
        ),
        (None, Some(_)) => Span::styled("paused", Style::new().fg(Color::Yellow)),
        (None, None) => Span::styled("live", Style::new().fg(Color::Green)),
    };
    // A lost connection comes first, because the end may be cut at 80 columns.
    Line::from(vec![
        Span::styled(name, Style::new().add_modifier(Modifier::BOLD)),
        state,
        Span::raw("  "),
        Span::raw(place),
    ])
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
    let widths = [
        Constraint::Min(12),
        Constraint::Length(10),
        Constraint::Length(11),
        Constraint::Length(6),
        Constraint::Length(5),
        Constraint::Length(5),
        Constraint::Length(5),
        Constraint::Length(7),
        Constraint::Length(7),
    ];
    let header = Row::new(["WORKER", "ROLE", "STATE", "ACTIVE", "QUEUE", "KV", "HITS", "TTFT", "ITL"]);
    // What the other columns leave, with a space after each.
    let room = usize::from(area.width).saturating_sub(64).max(12);
    let table = Table::new(rows.iter().map(|worker| worker_row(worker, model, room)), widths)
        .header(header.style(Style::new().add_modifier(Modifier::BOLD)))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
        .block(Block::new().borders(Borders::TOP).title(title));
    let selected = (!rows.is_empty()).then(|| view.selected.min(rows.len() - 1));
    frame.render_stateful_widget(table, area, &mut TableState::new().with_selected(selected));
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
    let id = if id.len() <= 10 { format!("{id} ") } else { String::new() };
    let address = address(worker);
    let room = room.saturating_sub(id.len());
    let over = address.chars().count().saturating_sub(room);
    match address.char_indices().nth(over + 1).filter(|_| over > 0) {
        Some((start, _)) => format!("{id}…{}", address.get(start..).unwrap_or_default()),
        None => format!("{id}{address}"),
    }
}

fn address(worker: &Worker) -> &str {
    worker.spec.url.split_once("://").map_or(&*worker.spec.url, |(_, rest)| rest)
}

fn slot_table(model: &Model, width: u16) -> Table<'static> {
    let digests = digest_columns(&model.slots, usize::from(width));
    let widths = [
        Constraint::Length(20),
        Constraint::Min(20),
        Constraint::Length(u16::try_from(digests).unwrap_or(u16::MAX)),
        Constraint::Length(12),
        Constraint::Length(12),
    ];
    let header = Row::new(["SLOT", "POLICY", "DIGEST", "STATE", "TRIALS"]);
    // What the other columns leave, with a space after each.
    let room = usize::from(width).saturating_sub(48 + digests).max(20);
    Table::new(model.slots.iter().map(|slot| slot_row(slot, room, digests)), widths)
        .header(header.style(Style::new().add_modifier(Modifier::BOLD)))
        .block(Block::new().borders(Borders::TOP).title(" slots "))
}

/// Columns of the longest list of digests, or what the other columns leave of `width`.
fn digest_columns(slots: &[Slot], width: usize) -> usize {
    let whole = slots.iter().map(|slot| digests(slot.digest.as_deref(), &slot.parts, usize::MAX).len());
    whole.max().unwrap_or(0).clamp(12, width.saturating_sub(68).max(12))
}

/// A long name of a policy loses its end, and not its generation, so that both fit `room` columns.
fn slot_row(slot: &Slot, room: usize, columns: usize) -> Row<'static> {
    let name = match &slot.model {
        Some(model) => format!("{} {model}", slot.slot),
        None => slot.slot.clone(),
    };
    let state = if slot.breaker_open { "breaker open" } else { &slot.state };
    let generation = format!("@{}", slot.generation);
    let colour = if slot.breaker_open { Color::Red } else { Color::Reset };
    Row::new(vec![
        Cell::from(safe(&name)),
        Cell::from(format!("{}{generation}", cut(&clean(&slot.policy), room - generation.len().min(room)))),
        Cell::from(safe(&digests(slot.digest.as_deref(), &slot.parts, columns))),
        Cell::from(safe(state)).style(Style::new().fg(colour)),
        Cell::from(safe(&trials(slot))),
    ])
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
    let height = u16::try_from(HELP.len()).unwrap_or(u16::MAX).saturating_add(2).min(area.height);
    let [area] = Layout::vertical([Constraint::Length(height)]).areas(area);
    frame.render_widget(Clear, area);
    let lines: Vec<Line<'_>> = HELP.iter().map(|line| Line::raw(*line)).collect();
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(" help ")), area);
}

/// Text of the gateway, made safe for the terminal.
fn safe(text: &str) -> String {
    cut(&clean(text), 120)
}
