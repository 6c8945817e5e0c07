//! Checks what `serve` would check, without serving: ports, tokenizers, slots and policy files.

use std::{io::ErrorKind, sync::Arc};

use pointsman_certificates::pem::Expired;
use pointsman_policy_runtime::Command;
use pointsman_workers::{Registry, Role, WorkerSpec};

use super::{
    listen::{CLIENT_SEND_BUFFER, bind, cannot_listen},
    slots,
};
use crate::{
    config::{Config, ConfigErrors, Problem, Server, settings::Settings},
    state::open_files::too_many_threads,
    tasks::Tasks,
    tls::TlsContext,
    tokenization::Tokens,
};

mod files;

/// Key of the directory of clients' keys.
const KEY_DIR: &str = "auth.key_dir";

/// Findings of a check.
#[derive(Debug)]
pub(crate) struct Findings {
    /// Problems that keep the gateway, or one of its slots, from running as configured.
    pub(crate) problems: ConfigErrors,
    /// Values that are probably mistakes.
    pub(crate) warnings: ConfigErrors,
}

/// Checks a configuration in which `found` is known to be wrong.
///
/// # Errors
/// The operating system starts no thread.
pub(crate) fn check(config: &Config, found: Vec<Problem>) -> anyhow::Result<Findings> {
    let settings = config.settings_to_check();
    let (mut problems, mut warnings) = (Vec::new(), advice(&settings));
    warnings.extend(files::log_dir(&settings));
    problems.extend(threads(&settings.server));
    ports(&settings, &mut problems, &mut warnings);
    let tokens = Tokens::new(1, Tasks::default()).load(&settings.models, &Arc::new(Registry::default()));
    problems.extend(tokens.err().unwrap_or_default());
    let certificates = TlsContext::new().load(&settings.server, &settings.upstream, Expired::Refused);
    problems.extend(certificates.err().unwrap_or_default());
    let proxies = TlsContext::new().load_proxies(settings.ext_proc.tls.as_ref(), Expired::Refused);
    problems.extend(proxies.err().unwrap_or_default());
    policies(config, settings, &mut problems, &mut warnings)?;
    // A worker entry or a key that could not be read does not count as missing.
    let of_workers = |problem: &Problem| {
        let of_flag = problem.flag.as_ref().is_some_and(|flag| flag.starts_with("--worker"));
        of_flag || ["workers", "discovery"].iter().any(|section| problem.path.starts_with(section))
    };
    let of_keys = |problem: &Problem| problem.path.starts_with(KEY_DIR);
    warnings.retain(|warning| match &*warning.path {
        "workers" => !found.iter().any(of_workers),
        KEY_DIR => !found.iter().any(of_keys),
        // Instead of a refused value, the default one was checked.
        path => !found.iter().any(|problem| problem.path == path),
    });
    let known = |problem: &Problem| found.iter().any(|old| old.path == problem.path);
    let mut problems = config.in_file(problems);
    problems.retain(|problem| problem.path.is_empty() || !known(problem));
    problems.extend(found);
    Ok(Findings { problems: config.errors(problems), warnings: config.errors(config.in_file(warnings)) })
}

/// Returns why the data threads cannot run, if they cannot.
pub(super) fn threads(server: &Server) -> Option<Problem> {
    too_many_threads(server.client_threads()).map(|problem| Problem::new("server.threads", problem))
}

/// Binds each address. A port in use is a warning, because the gateway that runs with this configuration may
/// use it.
fn ports(settings: &Settings, problems: &mut Vec<Problem>, warnings: &mut Vec<Problem>) {
    let ext_proc = settings.ext_proc.listen.map(|address| ("ext_proc.listen", address));
    let listeners =
        [("server.listen", settings.server.listen), ("server.admin_listen", settings.server.admin_listen)];
    for (path, address) in listeners.into_iter().chain(ext_proc) {
        if let Err(refused) = bind(address, CLIENT_SEND_BUFFER) {
            let in_use = refused.error.kind() == ErrorKind::AddrInUse;
            let list = if in_use { &mut *warnings } else { &mut *problems };
            list.push(cannot_listen(path)(refused));
        }
    }
}

/// Loads every policy as the start of the daemon does.
fn policies(
    config: &Config,
    mut settings: Settings,
    problems: &mut Vec<Problem>,
    warnings: &mut Vec<Problem>,
) -> anyhow::Result<()> {
    // Reported with the values.
    settings.forget_missing_dir();
    let has_dir = settings.policies.dir.is_some();
    let mut opened = match slots::open(&settings, config.policies.compiler.clone(), 1) {
        Ok(opened) => opened,
        Err(problem) => {
            problems.push(problem);
            return Ok(());
        }
    };
    let known: Vec<String> = opened.problems.iter().map(|problem| problem.path.clone()).collect();
    problems.append(&mut opened.problems);
    if !has_dir {
        return Ok(());
    }
    let (_slots, manager) = opened.start(&settings)?;
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let report = runtime.block_on(manager.execute(Command::Reload))?;
    // Policies that the configuration names were found above.
    let found = report.refused.iter().map(slots::refused);
    problems.extend(found.filter(|problem| !known.contains(&problem.path)));
    for (stray, problem) in report.strays.iter().zip(&report.stray_problems) {
        let message = format!("nothing runs `{stray}`: {problem}");
        warnings.push(Problem::new("policies.dir", message));
    }
    if report.more_strays > 0 {
        let message = format!("nothing runs {} further files either", report.more_strays);
        warnings.push(Problem::new("policies.dir", message));
    }
    for lane in &report.compiling {
        let message = format!("the policy of `{lane}` still compiles and is not checked; check again");
        warnings.push(Problem::new("policies.dir", message));
    }
    Ok(())
}

/// Logs what is probably not meant.
pub(super) fn log_advice(settings: &Settings) {
    advice(settings).iter().for_each(log_warning);
}

/// Logs which keys of clients seem to be missing.
pub(super) fn log_missing_keys(settings: &Settings) {
    missing_keys(settings).for_each(|warning| log_warning(&warning));
}

fn log_warning(warning: &Problem) {
    tracing::warn!(key = warning.path, problem = warning.message, "configuration warning");
}

fn missing_keys(settings: &Settings) -> impl Iterator<Item = Problem> {
    settings.missing_keys().into_iter().map(|message| Problem::new(KEY_DIR, message))
}

/// Returns what contradicts itself without being wrong.
fn advice(settings: &Settings) -> Vec<Problem> {
    let mut warnings = Vec::new();
    warnings.extend(slots::waiting_settings(settings));
    warnings.extend(missing_keys(settings));
    warnings.extend(files::unreadable(settings));
    warnings.extend(files::authorities(settings));
    let mut warn = |path: String, message: String| warnings.push(Problem::new(path, message));
    let (routing, queue) = (&settings.routing, &settings.queue);
    if routing.local_fallback && routing.enforce_disagg {
        let message = "`true` has no effect with `enforce_disagg = true`: remove one of them";
        warn("routing.local_fallback".to_owned(), message.to_owned());
    }
    if queue.limit > 0 && queue.timeout.is_zero() {
        let message = "`0s` lets no request wait: give a time, or remove `queue.limit`";
        warn("queue.timeout".to_owned(), message.to_owned());
    }
    let workers = &settings.workers;
    if workers.is_empty() && !settings.discovery.has_sources() {
        let message = "no worker and no source of [discovery] is configured: requests are answered with 503 until a \
                       worker is registered (`PUT /workers/ID`)";
        warn("workers".to_owned(), message.to_owned());
    }
    let has = |role| workers.iter().any(|worker| worker.role == role);
    let lonely = match (has(Role::Prefill), has(Role::Decode)) {
        (true, false) => Some((Role::Prefill, Role::Decode)),
        (false, true) => Some((Role::Decode, Role::Prefill)),
        _ => None,
    };
    if let Some((role, missing)) = lonely {
        let index = workers.iter().position(|worker| worker.role == role).unwrap_or(0);
        let message = if role == Role::Decode
            && !routing.enforce_disagg
            && workers.iter().any(|worker| worker.local_prefill)
        {
            "no worker is configured for prefill: `decode` workers compute every prompt themselves; add a `prefill` \
             worker, or give them `role = \"aggregated\"`"
                .to_owned()
        } else {
            format!("`{role}` workers cannot serve without a `{missing}` worker: add one")
        };
        warn(format!("workers[{index}].role"), message);
    }
    if routing.enforce_disagg && !workers.is_empty() && !has(Role::Prefill) {
        let message = "`true` refuses every request: no worker has `role = \"prefill\"`";
        warn("routing.enforce_disagg".to_owned(), message.to_owned());
    }
    for (index, worker) in workers.iter().enumerate() {
        let same = |other: &WorkerSpec| other.url == worker.url && other.id != worker.id;
        if let Some(same) = workers.iter().take(index).position(same) {
            let message =
                format!("`{}` is also the URL of workers[{same}]: its load is counted twice", worker.url);
            warn(format!("workers[{index}].url"), message);
        }
    }
    warnings
}
