//! Validates a configuration: the values of each section, what sections say together, and the files that they
//! name.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use http::Uri;
use pointsman_config_file::{Report, Section};
use pointsman_routing::BusyByLeg;
use pointsman_workers::WorkerId;

use super::{
    Config, Problem, Tls, credentials::Credentials, settings::Settings, slots::SlotEntry,
    slots::is_folder_name,
};

/// Maximum number of `[[auth.certificates]]`.
const MAX_CERTIFICATES: usize = 10_000;

/// Rules of more than one section.
const RULES: [fn(&Config, &mut Report<'_>); 8] =
    [body_sizes, picker_address, tenant_header, certificates, engine_load, slots, worker_waits, workers];

/// Validates `config`. Returns the settings with all problems. If there are problems, the settings serve only
/// to look for more.
pub(super) fn resolve(config: &Config) -> (Settings, Vec<Problem>) {
    let (mut config, mut problems) = (config.clone(), Vec::new());
    let mut report = Report::new(&mut problems);
    Section::check(&mut config, &mut report);
    RULES.iter().for_each(|rule| rule(&config, &mut report));
    let credentials = Credentials::read(&config, &mut problems);
    (Settings::new(config, credentials), problems)
}

fn body_sizes(config: &Config, report: &mut Report<'_>) {
    let (all, one) = (config.limits.body_bytes_in_flight, config.server.max_body_bytes);
    // Large bodies use at most seven eighths.
    if all / 8 * 7 < one {
        let message = format!(
            "`{all}` is too small for one body of server.max_body_bytes ({one}): expected 8/7 of that or more"
        );
        report.add("limits.body_bytes_in_flight", message);
    }
}

fn picker_address(config: &Config, report: &mut Report<'_>) {
    let server = &config.server;
    let others = [("server.listen", server.listen), ("server.admin_listen", server.admin_listen)];
    config.ext_proc.check_listen(others, &mut report.at("ext_proc"));
}

fn tenant_header(config: &Config, report: &mut Report<'_>) {
    let header = &config.server.tenant_header;
    if !header.is_empty() && config.auth.trusted_proxies.is_empty() {
        let message = format!(
            "`{header}` has no effect without trusted addresses: name those of the proxies that set it in \
             auth.trusted_proxies"
        );
        report.add("server.tenant_header", message);
    }
    for (name, _) in config.tenants.iter().filter(|(name, _)| name.is_empty()) {
        report.add(&format!("tenants.{name}"), "the name of a tenant is empty: give it a name");
    }
}

/// A certificate has one owner, and its listener asks for it.
fn certificates(config: &Config, report: &mut Report<'_>) {
    let entries = &config.auth.certificates;
    if entries.len() > MAX_CERTIFICATES {
        let message = format!("{} entries are more than the limit of {MAX_CERTIFICATES}", entries.len());
        report.add("auth.certificates", message);
        return;
    }
    let mut seen = BTreeMap::new();
    for (index, entry) in entries.iter().enumerate() {
        let path = format!("auth.certificates[{index}]");
        let (listener, tls) = match entry.role {
            Some(_) => ("server.admin_tls", &config.server.admin_tls),
            None => ("server.tls", &config.server.tls),
        };
        if tls.as_ref().is_none_or(|tls: &Tls| tls.client_ca_file.is_none()) {
            let message =
                format!("no certificate is asked for: name the authorities in `{listener}.client_ca_file`");
            report.add(&format!("{path}.name"), message);
        }
        if let Some(other) = seen.insert((entry.role.is_some(), entry.matched_name()), path.clone()) {
            let message = format!("`{}` is already the name of {other}: remove one of them", entry.name);
            report.add(&format!("{path}.name"), message);
        }
    }
}

/// Thresholds of the engines' load figures need these figures.
fn engine_load(config: &Config, report: &mut Report<'_>) {
    if !config.probe.load_interval.is_zero() {
        return;
    }
    let mut check = |path: &str, busy: &BusyByLeg| {
        for (leg, thresholds) in busy {
            let keys = [
                ("kv_usage", thresholds.kv_usage.is_some()),
                ("engine_queue", thresholds.engine_queue.is_some()),
            ];
            for (key, _) in keys.into_iter().filter(|(_, is_set)| *is_set) {
                let message = "the load of engines is never read: set probe.load_interval to more than 0";
                report.add(&format!("{path}.{leg}.{key}"), message);
            }
        }
    };
    check("routing.busy", &config.routing.busy);
    for (name, model) in &config.models {
        check(&format!("models.{name}.busy"), &model.busy);
    }
}

/// Slots of models, which use the directory of all, and memory that is shared with other gateways.
fn slots(config: &Config, report: &mut Report<'_>) {
    let has_dir = config.policies.dir.is_some();
    let no_others = config.replicas.servers.is_empty();
    let shared = |section: &str, kind: &dyn std::fmt::Display, entry: &SlotEntry, report: &mut Report<'_>| {
        if entry.shared_state && no_others {
            let path = format!("{section}.slots.{kind}.shared_state");
            report.add(&path, "needs other gateways: add `replicas.servers`, or remove the key");
        }
    };
    for (kind, entry) in &config.policies.slots {
        shared("policies", kind, entry, report);
    }
    for (name, model) in &config.models {
        let section = format!("models.{name}");
        if !model.slots.is_empty() && !is_folder_name(name) {
            let message =
                format!("`{name}` cannot name a directory of policies: expected NAME or OWNER/NAME");
            report.add(&format!("{section}.slots"), message);
        }
        for (kind, entry) in &model.slots {
            entry.check_content(*kind, has_dir, &mut report.at(&format!("{section}.slots.{kind}")));
            shared(&section, kind, entry, report);
        }
    }
}

/// Requests that wait for workers have places in the queue.
fn worker_waits(config: &Config, report: &mut Report<'_>) {
    let waits = config.models.iter().filter(|(_, model)| model.wait_for_workers.is_some());
    for (name, _) in waits.filter(|_| config.queue.limit == 0) {
        let message = "no request may wait: set queue.limit to more than 0";
        report.add(&format!("models.{name}.wait_for_workers"), message);
    }
}

/// Each description was validated when it was read.
fn workers(config: &Config, report: &mut Report<'_>) {
    let (workers, server) = (&config.workers, &config.server);
    let listeners = [("server.listen", server.listen), ("server.admin_listen", server.admin_listen)];
    for (index, worker) in workers.iter().enumerate() {
        if let Some((key, _)) = listeners.iter().find(|(_, listen)| leads_to(&worker.url, *listen)) {
            let message =
                format!("`{}` is this gateway itself ({key}): give the URL of an engine", worker.url);
            report.add(&format!("workers[{index}].url"), message);
        }
        if let Some(same) = workers.iter().take(index).position(|other| other.id == worker.id) {
            let (key, message) = if worker.id == WorkerId::of_url(&worker.url) {
                let message =
                    format!("`{}` is also the URL of workers[{same}]: list each engine once", worker.url);
                ("url", message)
            } else {
                let message =
                    format!("`{}` is already the id of workers[{same}]: give each worker its own", worker.id);
                ("id", message)
            };
            report.add(&format!("workers[{index}].{key}"), message);
        }
    }
}

/// Returns whether a URL is that of a listener of this host.
fn leads_to(url: &str, listen: SocketAddr) -> bool {
    let Ok(uri) = url.parse::<Uri>() else { return false };
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let (ip, own) = (host.parse::<IpAddr>().map(|ip| ip.to_canonical()), listen.ip());
    let same_host = match ip {
        // A connection to 0.0.0.0 or [::] is one to loopback.
        Ok(ip) if own.is_unspecified() => {
            (ip.is_loopback() || ip.is_unspecified()) && (own.is_ipv6() || ip.is_ipv4())
        }
        Ok(ip) => ip == own || (ip.is_unspecified() && own.is_loopback() && ip.is_ipv4() == own.is_ipv4()),
        Err(_) => host.eq_ignore_ascii_case("localhost") && (own.is_unspecified() || own.is_loopback()),
    };
    same_host && listen.port() != 0 && uri.port_u16() == Some(listen.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i19_a_url_that_leads_to_a_listener_is_found() {
        let leads = |url: &str, listen: &str| leads_to(url, listen.parse().unwrap());
        // I19.5
        for (url, listen) in [
            ("http://127.0.0.1:80", "127.0.0.1:80"),
            ("http://127.0.0.2:80", "0.0.0.0:80"),
            ("http://0.0.0.0:80", "127.0.0.1:80"),
            ("https://localhost:80", "[::]:80"),
            ("http://LOCALHOST:80", "127.0.0.1:80"),
            ("http://[::1]:80", "[::]:80"),
            ("http://127.0.0.1:80", "[::]:80"),
            ("http://[::ffff:127.0.0.1]:80", "127.0.0.1:80"),
        ] {
            assert!(leads(url, listen), "{url} {listen}");
        }
        for (url, listen) in [
            ("http://127.0.0.1:81", "127.0.0.1:80"),
            ("http://127.0.0.2:80", "127.0.0.1:80"),
            ("http://[::1]:80", "0.0.0.0:80"),
            ("http://localhost:80", "10.0.0.1:80"),
            ("http://10.0.0.1:80", "0.0.0.0:80"),
            ("http://engine:80", "0.0.0.0:80"),
        ] {
            assert!(!leads(url, listen), "{url} {listen}");
        }
    }
}
