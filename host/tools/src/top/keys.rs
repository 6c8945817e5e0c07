//! Actions of the keys.

use ratatui::termion::event::Key;

use super::model::{Change, Model, View};

/// Longest filter, characters.
const MAX_FILTER: usize = 40;

/// Action of a key that does more than change the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    None,
    Quit,
    Change(Change),
}

/// Applies a key.
pub(super) fn handle_key(key: Key, view: &mut View, model: &Model) -> Action {
    if key == Key::Ctrl('c') {
        return Action::Quit;
    }
    if view.typing {
        type_filter(key, view);
        return Action::None;
    }
    if let Some(change) = view.confirm.take() {
        return if key == Key::Char('y') { Action::Change(change) } else { Action::None };
    }
    if std::mem::take(&mut view.help) && key != Key::Char('q') {
        return Action::None;
    }
    let last = view.rows(model).len().saturating_sub(1);
    match key {
        Key::Char('q') => return Action::Quit,
        Key::Char('h' | '?') => view.help = true,
        Key::Char('s') => view.sort = view.sort.next(),
        Key::Char('/') => view.typing = true,
        Key::Esc => view.filter.clear(),
        Key::Char('p' | ' ') => {
            view.paused = if view.paused.is_some() { None } else { Some(Box::new(model.clone())) };
        }
        Key::Up | Key::Char('k') => view.selected = view.selected.min(last).saturating_sub(1),
        Key::Down | Key::Char('j') => view.selected = (view.selected + 1).min(last),
        Key::Char('d') => view.confirm = change(view, model),
        _ => {}
    }
    Action::None
}

/// The change of the selected worker's drain.
fn change(view: &View, model: &Model) -> Option<Change> {
    let rows = view.rows(model);
    let worker = rows.get(view.selected.min(rows.len().saturating_sub(1)))?;
    model.may_change.then_some(Change { worker: worker.id, undo: worker.draining })
}

fn type_filter(key: Key, view: &mut View) {
    match key {
        Key::Char('\n') => view.typing = false,
        Key::Esc => {
            view.typing = false;
            view.filter.clear();
        }
        Key::Backspace => drop(view.filter.pop()),
        Key::Char(c) if !c.is_control() && view.filter.chars().count() < MAX_FILTER => view.filter.push(c),
        _ => {}
    }
    view.selected = 0;
}
