//! The configuration of an image: user, command, ports, labels. It agrees with `deploy/container/Dockerfile`.

use serde_json::{Value, json};

use super::{super::commit::Commit, USER};

const TITLE: &str = "Pointsman";
const DESCRIPTION: &str = "Gateway for disaggregated LLM serving";
/// Licences of Pointsman, glibc, libgcc and the root certificates.
const LICENSES: &str =
    "Apache-2.0 AND LGPL-2.1-or-later AND GPL-3.0-or-later WITH GCC-exception-3.1 AND MPL-2.0";
const PROGRAM: &str = "/usr/bin/pointsman";
/// Number of nanoseconds in a second. The times of a health check are in nanoseconds.
const SECOND: u64 = 1_000_000_000;

/// Returns the configuration of an image with one layer.
pub(super) fn config(commit: &Commit, diff_id: &str) -> Value {
    json!({
        "created": commit.created,
        "architecture": architecture(),
        "os": "linux",
        "config": {
            "User": format!("{USER}:{USER}"),
            "ExposedPorts": { "8080/tcp": {} },
            "Env": [
                "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt",
            ],
            "Entrypoint": [PROGRAM],
            "Cmd": ["serve", "--config", "/etc/pointsman/pointsman.toml", "--listen", "0.0.0.0:8080"],
            "WorkingDir": "/",
            "Labels": labels(commit),
            // SIGTERM starts the drain. A runtime has to wait longer than `timeouts.drain` (30 s) before it
            // kills the process.
            "StopSignal": "SIGTERM",
            // Docker uses this. Kubernetes has its own probes.
            "Healthcheck": {
                "Test": ["CMD", PROGRAM, "health"],
                "Interval": 10 * SECOND,
                "Timeout": 5 * SECOND,
                "StartPeriod": 30 * SECOND,
            },
        },
        "rootfs": { "type": "layers", "diff_ids": [diff_id] },
        "history": [{ "created": commit.created, "created_by": "cargo xtask package" }],
    })
}

/// Returns the labels of the image, which are also the annotations of its manifest.
pub(super) fn labels(commit: &Commit) -> Value {
    let mut labels = json!({
        "org.opencontainers.image.title": TITLE,
        "org.opencontainers.image.description": DESCRIPTION,
        "org.opencontainers.image.licenses": LICENSES,
        "org.opencontainers.image.version": commit.version,
        "org.opencontainers.image.revision": commit.hash,
        "org.opencontainers.image.created": commit.created,
    });
    // The value is `repository` of the workspace, once that is set.
    if let Some(source) = option_env!("CARGO_PKG_REPOSITORY").filter(|source| !source.is_empty()) {
        labels["org.opencontainers.image.source"] = source.into();
    }
    labels
}

/// Returns the architecture of this machine, as OCI names it.
pub(super) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{super::super::commit::Commit, config};
    use crate::sh;

    /// Returns the argument of an instruction in the last stage of the Dockerfile.
    fn instruction(keyword: &str) -> String {
        let text = std::fs::read_to_string(sh::root().join("deploy/container/Dockerfile")).unwrap();
        let text = text.replace("\\\n", " ");
        let last = &text[text.rfind("\nFROM ").unwrap()..];
        let argument = last.lines().find_map(|line| line.strip_prefix(&format!("{keyword} ")));
        argument.unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn words(text: &str) -> Value {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn the_image_is_configured_as_the_dockerfile_says() {
        let commit = Commit::of_head().unwrap();
        let config = config(&commit, "sha256:00")["config"].clone();
        assert_eq!(config["User"], instruction("USER"));
        assert_eq!(config["ExposedPorts"], json!({ format!("{}/tcp", instruction("EXPOSE")): {} }));
        assert_eq!(config["StopSignal"], instruction("STOPSIGNAL"));
        assert_eq!(config["Entrypoint"], words(&instruction("ENTRYPOINT")));
        assert_eq!(config["Cmd"], words(&instruction("CMD")));
        let check = instruction("HEALTHCHECK");
        let (times, command) = check.split_once(" CMD ").unwrap();
        assert_eq!(times, "--interval=10s --timeout=5s --start-period=30s");
        let own = config["Healthcheck"]["Test"].as_array().unwrap();
        assert_eq!(Value::from(own[1..].to_vec()), words(command));
        let labels = instruction("LABEL");
        for name in ["title", "description"] {
            let name = format!("org.opencontainers.image.{name}");
            let own = config["Labels"][&name].as_str().unwrap();
            assert!(labels.contains(&format!("{name}=\"{own}\"")), "{labels}");
        }
        assert_eq!(config["Labels"]["org.opencontainers.image.version"], commit.version);
    }
}
