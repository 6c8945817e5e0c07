//! `pointsman top`: a live view of a running gateway in a terminal.

use std::{
    io::{IsTerminal as _, Write as _},
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    thread,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use parking_lot::Mutex;
use pointsman_admin_cli::{EXIT_CODES, GatewayArgs, block_on, report_gateway_error};
use pointsman_cli::print;
use ratatui::{
    Terminal,
    backend::{Backend, TermionBackend, TestBackend},
    termion::{event::Key, input::TermRead as _, raw::IntoRawMode as _, screen::IntoAlternateScreen as _},
};
use tokio::sync::mpsc;

use self::{
    keys::{Action, handle_key},
    model::{Change, Model, View},
};

mod events;
mod feed;
mod frame;
mod keys;
mod model;
#[cfg(test)]
mod tests;

/// Longest time between two frames.
const FRAME_INTERVAL: Duration = Duration::from_millis(250);
/// Longest wait for the first events of `--once`.
const ONCE_TIMEOUT: Duration = Duration::from_secs(10);
/// Columns and lines of the frame of `--once`.
const ONCE_SIZE: (u16, u16) = (80, 24);
/// Leaves the alternate screen and shows the cursor.
const LEAVE: &[u8] = b"\x1b[?1049l\x1b[?25h";

/// Arguments of `top`.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct TopArgs {
    /// Print one frame of 80 columns and 24 lines as text, and end.
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    gateway: GatewayArgs,
}

/// Events that the view waits for.
#[derive(Debug)]
enum Input {
    Key(Key),
    End(anyhow::Result<()>),
}

impl TopArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        report_gateway_error(self.watch())
    }

    fn watch(&self) -> anyhow::Result<ExitCode> {
        let gateway = self.gateway.client()?;
        if self.once {
            let model = block_on(feed::once(&gateway, ONCE_TIMEOUT))?;
            print(&text_of(&model, &View::default(), ONCE_SIZE.0, ONCE_SIZE.1)?)?;
            return Ok(ExitCode::SUCCESS);
        }
        if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
            bail!("pointsman top needs a terminal; `pointsman top --once` prints one frame as text");
        }
        let model = feed::shared(&gateway);
        let (inputs, waiting) = sync_channel(64);
        let (changes, wanted) = mpsc::channel(8);
        thread::Builder::new().name("events".to_owned()).spawn({
            let (model, inputs) = (model.clone(), inputs.clone());
            move || {
                let reading = || block_on(feed::run(&gateway, &model, wanted, &inputs));
                // Without events the view would show old figures for ever.
                let ended = catch_unwind(AssertUnwindSafe(reading));
                let ended =
                    ended.unwrap_or_else(|_| Err(anyhow!("reading events panicked; report this bug")));
                let _ = inputs.send(Input::End(ended));
            }
        })?;
        thread::Builder::new().name("keys".to_owned()).spawn(move || read_keys(&inputs))?;
        show(&model, &waiting, &changes)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Sends every key until the terminal is gone.
fn read_keys(inputs: &SyncSender<Input>) {
    for key in std::io::stdin().keys() {
        let Ok(key) = key else { break };
        if inputs.send(Input::Key(key)).is_err() {
            return;
        }
    }
    let _ = inputs.send(Input::End(Ok(())));
}

/// Draws until the operator quits. The terminal is restored when the values that changed it are dropped, also
/// by a panic.
fn show(
    model: &Mutex<Model>,
    inputs: &Receiver<Input>,
    changes: &mpsc::Sender<Change>,
) -> anyhow::Result<()> {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        // The message must not vanish with the alternate screen.
        let _ = std::io::stdout().write_all(LEAVE);
        hook(info);
    }));
    let screen = std::io::stdout().into_raw_mode().context("switching the terminal to raw mode")?;
    let screen = screen.into_alternate_screen().context("switching to the alternate screen")?;
    let mut terminal = Terminal::new(TermionBackend::new(screen))?;
    let mut view = View::default();
    let ended = loop {
        let now = model.lock().clone();
        if let Err(error) = terminal.draw(|frame| frame::draw(frame, &now, &view)) {
            break Err(error.into());
        }
        let input = match inputs.recv_timeout(FRAME_INTERVAL) {
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => break Ok(()),
            Ok(input) => input,
        };
        let key = match input {
            Input::Key(key) => key,
            Input::End(ended) => break ended,
        };
        let shown = view.paused.clone();
        match handle_key(key, &mut view, shown.as_deref().unwrap_or(&now)) {
            Action::None => model.lock().message = None,
            Action::Quit => break Ok(()),
            Action::Change(change) => {
                let sent = changes.try_send(change).is_ok();
                model.lock().message =
                    Some(if sent { "sent" } else { "the gateway is still busy" }.to_owned());
            }
        }
    };
    let _ = terminal.show_cursor();
    ended
}

/// Draws one frame as text.
fn text_of(model: &Model, view: &View, width: u16, height: u16) -> anyhow::Result<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height))?;
    terminal.draw(|frame| frame::draw(frame, model, view))?;
    let size = terminal.backend().size()?;
    let buffer = terminal.backend().buffer();
    let mut text = String::new();
    for y in 0..size.height {
        let line: String =
            (0..size.width).filter_map(|x| buffer.cell((x, y))).map(|cell| cell.symbol()).collect();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    Ok(text)
}
