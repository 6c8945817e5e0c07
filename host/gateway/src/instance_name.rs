//! The name of this gateway among others.

use std::net::SocketAddr;

/// Longest name, so that it fits into a subject of NATS.
const LONGEST: usize = 64;

/// Returns the names of the host and the port, which a restart keeps.
pub(crate) fn instance_name(address: SocketAddr) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = Some(host.trim()).filter(|host| !host.is_empty()).unwrap_or("gateway");
    let port = format!("-{}", address.port());
    let fits = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
    let host: String = host.chars().map(fits).take(LONGEST - port.len()).collect();
    host + &port
}
