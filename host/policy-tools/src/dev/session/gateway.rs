//! Watches what is installed in the gateway.

use std::time::Duration;

use pointsman_admin_cli::GatewayError;
use pointsman_routing::Lane;
use tokio::time::Instant;

use super::{INSTALL_POLL, LIVE_POLL, Session};
use crate::dev::live::{Fate, Look};

/// Longest time for a look.
const LOOK_TIMEOUT: Duration = Duration::from_secs(5);

impl Session {
    pub(super) fn start_look(&mut self) {
        let (Some((gateway, slot)), Some(current)) = (&self.gateway, &self.current) else { return };
        let gateway = gateway.clone().with_timeout(LOOK_TIMEOUT);
        self.look = Some(Box::pin(slot.clone().look(gateway, current.policy.after())));
    }

    pub(super) fn looked(&mut self, look: Result<Look, GatewayError>) -> anyhow::Result<()> {
        self.next_look = Instant::now() + LIVE_POLL;
        let look = match look {
            Ok(look) => look,
            Err(error) => {
                if !std::mem::replace(&mut self.away, true) {
                    self.console.clear_status()?;
                    self.console.print_below("gateway", &format!("{error}\nlooking again every second"))?;
                }
                return Ok(());
            }
        };
        if std::mem::replace(&mut self.away, false) {
            self.console.print_below("gateway", "it answers again")?;
        }
        let Some(current) = &mut self.current else { return Ok(()) };
        let seen = current.policy.see(&look);
        if current.policy.generation().is_some() {
            self.earlier = None;
        }
        if current.policy.is_awaited() {
            self.next_look = Instant::now() + INSTALL_POLL;
        }
        seen.lines.iter().try_for_each(|(label, text)| self.console.print_below(label, text))?;
        if let Some(status) = seen.status {
            self.console.status(&status)?;
        }
        match seen.fate {
            Fate::Open => Ok(()),
            Fate::Refused => self.refused(),
            Fate::Over => {
                self.current = None;
                self.console.clear_status()
            }
        }
    }

    /// Puts the running policy's file back, so that the directory matches what the gateway runs. Without one,
    /// the refused file stays: a change of the gateway's configuration may admit it.
    fn refused(&mut self) -> anyhow::Result<()> {
        self.next_look = Instant::now() + LIVE_POLL;
        // A replay would tell the same.
        self.step = None;
        if let (Some(earlier), Some(files)) = (self.earlier.take(), &mut self.files) {
            let placed =
                if earlier.policy.lane == Lane::Shadow { files.place(&earlier.bytes) } else { Ok(()) };
            self.current = Some(earlier);
            if let Err(error) = placed {
                self.console.print_below("install", &format!("{error:#}"))?;
            }
        } else if let Some(current) = &mut self.current {
            current.policy.note_refusal();
        }
        self.fail()
    }
}
