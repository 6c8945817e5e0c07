//! Files and directories that the gateway uses after its start, and that may be repaired without a restart.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use pointsman_certificates::pem::is_of_authority;
use rustix::fs::{Access, access};

use crate::config::{Problem, settings::Settings};

/// Warns about listeners whose certificate is that of an authority: many clients refuse it.
pub(super) fn authorities(settings: &Settings) -> impl Iterator<Item = Problem> {
    let server = &settings.server;
    let listeners = [
        ("server.tls", &server.tls),
        ("server.admin_tls", &server.admin_tls),
        ("ext_proc.tls", &settings.ext_proc.tls),
    ];
    let listeners = listeners.into_iter().filter_map(|(path, tls)| Some((path, &tls.as_ref()?.cert_file)));
    listeners.filter(|(_, file)| is_of_authority(file)).map(|(path, file)| {
        let message = format!(
            "the certificate in `{}` is that of an authority, which `pointsman` and many clients refuse: make it with \
             `openssl req -x509 -addext basicConstraints=critical,CA:FALSE`, or use one that the authority signed",
            file.display()
        );
        Problem::new(format!("{path}.cert_file"), message)
    })
}

/// Returns the files of sources of workers and of the exchange between gateways that cannot be read.
pub(super) fn unreadable(settings: &Settings) -> Vec<Problem> {
    let (discovery, replicas) = (&settings.discovery, &settings.replicas);
    let mut files: Vec<(String, Option<&PathBuf>)> = Vec::new();
    for (index, source) in discovery.files.iter().enumerate() {
        files.push((format!("discovery.files[{index}].path"), Some(&source.path)));
    }
    for (index, etcd) in discovery.etcd.iter().enumerate() {
        let keys = [
            ("ca_file", &etcd.ca_file),
            ("cert_file", &etcd.cert_file),
            ("key_file", &etcd.key_file),
            ("password_file", &etcd.password_file),
        ];
        files.extend(keys.map(|(key, file)| (format!("discovery.etcd[{index}].{key}"), file.as_ref())));
    }
    for (index, kubernetes) in discovery.kubernetes.iter().enumerate() {
        let keys = [("token_file", &kubernetes.token_file), ("ca_file", &kubernetes.ca_file)];
        files.extend(keys.map(|(key, file)| (format!("discovery.kubernetes[{index}].{key}"), Some(file))));
    }
    if !replicas.servers.is_empty() {
        let keys = [
            ("password_file", &replicas.password_file),
            ("token_file", &replicas.token_file),
            ("nkey_file", &replicas.nkey_file),
            ("credentials_file", &replicas.credentials_file),
        ];
        files.extend(keys.map(|(key, file)| (format!("replicas.{key}"), file.as_ref())));
        if let Some(tls) = &replicas.tls {
            let keys =
                [("ca_file", &tls.ca_file), ("cert_file", &tls.cert_file), ("key_file", &tls.key_file)];
            files.extend(keys.map(|(key, file)| (format!("replicas.tls.{key}"), file.as_ref())));
        }
    }
    let unreadable = |(key, file): (String, Option<&PathBuf>)| {
        let file = file.filter(|file| !file.as_os_str().is_empty())?;
        let error = why_unreadable(file)?;
        let file = file.display();
        Some(Problem::new(
            key,
            format!("cannot read `{file}`: {error}; the gateway tries again while it runs"),
        ))
    };
    files.into_iter().filter_map(unreadable).collect()
}

fn why_unreadable(file: &Path) -> Option<String> {
    match std::fs::metadata(file) {
        Ok(found) if found.is_dir() => Some("it is a directory".to_owned()),
        // Opening a pipe would block until a process writes to it.
        Ok(found) if !found.is_file() => Some("it is not a regular file".to_owned()),
        Ok(_) => File::open(file).err().map(|error| error.to_string()),
        Err(error) => Some(error.to_string()),
    }
}

/// Returns why the directory of the decision log, or the nearest one in which it would be made, cannot be
/// written.
pub(super) fn log_dir(settings: &Settings) -> Option<Problem> {
    let dir = settings.decisions.log_dir.as_deref().filter(|dir| !dir.as_os_str().is_empty())?;
    let dir = std::path::absolute(dir).ok()?;
    let nearest = dir.ancestors().find(|path| path.symlink_metadata().is_ok())?;
    let why = if nearest.is_dir() {
        access(nearest, Access::WRITE_OK | Access::EXEC_OK).err()?.to_string()
    } else {
        "it is not a directory".to_owned()
    };
    let nearest = nearest.display();
    let message = format!("cannot write to `{nearest}`: {why}; no decision is logged until that is repaired");
    Some(Problem::new("decisions.log_dir", message))
}
