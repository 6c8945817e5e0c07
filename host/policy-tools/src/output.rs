//! Output of the commands.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
pub(crate) use pointsman_cli::{conclude, escaped, print};

/// Shows a spinner with a message on standard error until it is dropped. Shows nothing when that is not a
/// terminal.
pub(crate) fn spinner(message: String) -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {msg} ({elapsed})");
    let style = style.unwrap_or_else(|_| ProgressStyle::default_spinner());
    let spinner = ProgressBar::new_spinner().with_style(style).with_message(message);
    let spinner = spinner.with_finish(ProgressFinish::AndClear);
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}

/// Shows the progress of a transfer on standard error until it is dropped. Shows nothing when that is not a
/// terminal, but counts.
#[cfg(feature = "registry")]
pub(crate) fn transfer_bar(bytes: u64, message: String) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{spinner} {msg} {bytes} of {total_bytes}, {bytes_per_sec} ({elapsed})");
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(bytes).with_style(style).with_message(message);
    let bar = bar.with_finish(ProgressFinish::AndClear);
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}
