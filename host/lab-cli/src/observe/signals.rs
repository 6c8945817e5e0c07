//! Signals that end the observation, or the simulation after it.

use tokio::{
    signal::unix::{SignalKind, signal},
    time::{Duration, sleep},
};

/// Waits until the time is over, or for a signal. SIGHUP comes when the terminal goes away.
pub(super) async fn time_or_signal(time: Duration) -> anyhow::Result<()> {
    let mut hang_up = signal(SignalKind::hangup())?;
    tokio::select! {
        () = sleep(time) => Ok(()),
        _ = hang_up.recv() => Ok(()),
        ended = end_signal() => ended,
    }
}

/// Waits for SIGINT or SIGTERM. A shell and the kernel may each send SIGHUP, so that a second one is no wish
/// to end the simulation.
pub(super) async fn end_signal() -> anyhow::Result<()> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}
