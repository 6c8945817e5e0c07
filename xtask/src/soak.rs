//! `soak`: half of what the engines can serve, for hours, with workers that come, go and die, and with
//! policies, certificates and configuration that change. No error may be unexplained, and memory, file
//! descriptors and threads of the gateway may not grow.

use std::{path::PathBuf, time::Duration};

use anyhow::ensure;
use pointsman_guest_build::GuestBuild;
use tokio::time::{Instant, interval_at};

use crate::{certificates::Certificates, fleet, setup, sh, table::Checks};

mod changes;
mod plot;
mod readings;
mod traffic;

use self::{
    changes::Changes,
    readings::{Reading, Readings},
    traffic::Traffic,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Minutes of load.
    #[arg(long, default_value_t = 120)]
    minutes: u64,
    /// Requests a second. Half of what the engines can serve is 20.
    #[arg(long, default_value_t = 20)]
    rate: u32,
    /// Write a plot of memory, file descriptors and threads to this SVG file.
    #[arg(long)]
    plot: Option<PathBuf>,
}

/// Time between two readings of the gateway's process.
const READ: Duration = Duration::from_secs(10);
/// Time between two changes: a worker, a policy, a certificate, the configuration, an engine's end, in turn.
const CHANGE: Duration = Duration::from_secs(5);
/// Largest growth of memory from the second to the last quarter, as a share.
const GROWTH: f64 = 0.05;
/// Largest growth of the number of file descriptors from the second to the last quarter.
const DESCRIPTORS: f64 = 5.0;
/// Time from an engine's end in which its requests may fail with one valid error.
const EXPLAINED: Duration = Duration::from_secs(5);

/// Receipts are kept in little memory: their buffers are full within the first quarter.
const CONFIG: &str = "[decisions]\nkeep = 2000\nbytes = 2097152\n[probe]\ninterval = '500ms'\n\
                      [queue]\nlimit = 100\n[discovery]\ndrain = '5s'\nremoval_share = 1.0\n";

/// Runs the soak; returns an error when a limit is missed.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(args.minutes > 0, "--minutes 0: expected 1 or more");
    ensure!(args.rate > 0, "--rate 0: expected 1 or more");
    setup::run()?;
    let built =
        ["policy-least-loaded", "policy-kv-aware"].map(|name| GuestBuild::new(&sh::root(), name).build());
    let policies = built.into_iter().collect::<Result<Vec<_>, _>>()?;
    let bin = fleet::build("release")?;
    let dir = tempfile::Builder::new().prefix("pointsman-soak-").tempdir()?;
    let certificates = Certificates::write(dir.path())?;
    let workers = dir.path().join("workers.toml");
    let config = format!(
        "{CONFIG}[[discovery.files]]\nname = 'rack'\npath = {workers:?}\n[server.tls]\n{}",
        certificates.table()
    );
    let mut changes = Changes::start(&bin, dir.path(), (workers, config, certificates, policies))?;
    let fleet = fleet::gateway(&bin, dir.path(), changes.config(), &[]).await?;
    let time = Duration::from_secs(args.minutes * 60);
    let traffic = Traffic::start(&fleet, changes.authority(), args.rate)?;
    let mut readings = Readings::default();
    let (began, progress) = (Instant::now(), sh::progress(args.minutes * 60, "seconds"));
    let mut read = interval_at(began + READ, READ);
    let mut change = interval_at(began + CHANGE, CHANGE);
    while began.elapsed() < time {
        tokio::select! {
            _ = read.tick() => readings.add(began.elapsed(), Reading::of(&fleet).await?),
            _ = change.tick() => changes.next(&fleet).await?,
        }
        progress.set_position(began.elapsed().as_secs());
    }
    progress.finish_and_clear();
    let mut checks = Checks::default();
    traffic.stop().await.judge(&changes, &mut checks);
    changes.judge(&fleet, &mut checks).await?;
    checks.none("bookings left", fleet.booked(Duration::from_secs(30)).await?);
    readings.judge(&mut checks)?;
    if let Some(file) = &args.plot {
        std::fs::write(file, plot::svg(&readings))?;
    }
    checks.finish()
}
