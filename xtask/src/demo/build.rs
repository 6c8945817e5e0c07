//! Builds what the demo runs, with a line of progress.

use std::{path::PathBuf, time::Instant};

use anyhow::ensure;

use super::{Policies, guest, has_binaries};
use crate::{fleet, sh};

/// Builds the gateway and the engine with the profile that the tests use, too.
pub(super) fn binaries() -> anyhow::Result<PathBuf> {
    sh::status(
        "Step 1 of 3: building the gateway and the simulated engine (the first build compiles about 500 crates; \
         cargo shows its progress below)",
    );
    let started = Instant::now();
    let bin = fleet::build("dev")?;
    ensure!(has_binaries(&bin), "{} does not contain pointsman and pointsman-sim", bin.display());
    sh::status(&format!("built in {:.0} s", started.elapsed().as_secs_f64()));
    Ok(bin)
}

/// Builds the policies that the demo installs.
pub(super) fn policies() -> anyhow::Result<Policies> {
    sh::status("Step 2 of 3: building three routing policies to WebAssembly");
    let started = Instant::now();
    let policies = Policies {
        least_loaded: guest("policy-least-loaded")?,
        looping: guest("guest-hostile")?,
        weighted_random: guest("policy-weighted-random")?,
    };
    sh::status(&format!("built in {:.0} s", started.elapsed().as_secs_f64()));
    sh::status("Step 3 of 3: six engines, one gateway, and clients that replay a recorded trace");
    Ok(policies)
}
