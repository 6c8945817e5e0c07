//! An unpacked image, and the runtime's configuration of its containers. Both are made only from the image's
//! own configuration, not from this repository.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::{digest::sha256, sh};

/// Network of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Network {
    /// A separate network with only a loopback device.
    Own,
    Host,
}

/// An unpacked image.
#[derive(Debug)]
pub(super) struct Bundle {
    root: PathBuf,
    /// `config` of the image's configuration.
    config: Value,
    user: u32,
    group: u32,
}

impl Bundle {
    /// Unpacks the archive of a layout, and checks every digest.
    pub(super) fn unpack(image: &Path, dir: &Path) -> anyhow::Result<Self> {
        let (layout, root) = (dir.join("layout"), dir.join("root"));
        extract(&[], image, &layout)?;
        let index: Value = serde_json::from_slice(&fs::read(layout.join("index.json"))?)?;
        let manifest: Value = serde_json::from_slice(&fs::read(blob(&layout, &index["manifests"][0])?)?)?;
        let image: Value = serde_json::from_slice(&fs::read(blob(&layout, &manifest["config"])?)?)?;
        let layers = manifest["layers"].as_array().context("the manifest lists no layers")?;
        for layer in layers {
            // Owners are set by number, because this machine has other users.
            extract(&["--gzip", "--numeric-owner"], &blob(&layout, layer)?, &root)?;
        }
        let config = image["config"].clone();
        let user = config["User"].as_str().and_then(|user| user.split_once(':'));
        let (user, group) = user.context("the image names no user and group")?;
        let number = |text: &str| text.parse().with_context(|| format!("`{text}` is not a numeric user"));
        Ok(Self { root, user: number(user)?, group: number(group)?, config })
    }

    /// Returns the number of the user that the image names.
    pub(super) fn user(&self) -> u32 {
        self.user
    }

    /// Returns the image's own command.
    pub(super) fn command(&self) -> Vec<String> {
        [strings(&self.config["Entrypoint"]), strings(&self.config["Cmd"])].concat()
    }

    /// Returns the image's entry point with other arguments.
    pub(super) fn program(&self, arguments: &[&str]) -> Vec<String> {
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        [strings(&self.config["Entrypoint"]), arguments].concat()
    }

    /// Returns the command `pointsman policy` with arguments, for policy authors.
    pub(super) fn tool(&self, arguments: &[&str]) -> Vec<String> {
        self.program(&[&["policy"], arguments].concat())
    }

    /// Returns the command of the image's health check.
    pub(super) fn health_check(&self) -> anyhow::Result<Vec<String>> {
        let test = strings(&self.config["Healthcheck"]["Test"]);
        let (kind, command) = test.split_first().context("the image has no health check")?;
        ensure!(kind == "CMD", "the health check is of the kind {kind}, which needs a shell");
        Ok(command.to_vec())
    }

    pub(super) fn stop_signal(&self) -> String {
        self.config["StopSignal"].as_str().unwrap_or("SIGTERM").to_owned()
    }

    /// Writes the configuration of a container and returns its directory. `mounts` are files and directories
    /// of this machine with their paths in the container; they are mounted read-only.
    pub(super) fn write(
        &self,
        dir: &Path,
        name: &str,
        command: &[String],
        mounts: &[(&Path, &str)],
        network: Network,
    ) -> anyhow::Result<PathBuf> {
        let dir = dir.join(format!("bundle-{name}"));
        fs::create_dir_all(&dir)?;
        let bind = |(from, to): &(&Path, &str)| {
            let options = ["bind", "ro", "nosuid", "nodev"];
            json!({ "destination": to, "source": from, "type": "bind", "options": options })
        };
        let all = self.file_systems().into_iter().chain(mounts.iter().map(bind));
        let none: [&str; 0] = [];
        let sets = ["bounding", "effective", "inheritable", "permitted", "ambient"];
        let capabilities: Value = sets.map(|set| (set.to_owned(), json!(none))).into_iter().collect();
        let config = json!({
            "ociVersion": "1.0.2",
            "process": {
                "terminal": false,
                "user": { "uid": self.user, "gid": self.group },
                "args": command,
                "env": self.config["Env"],
                "cwd": self.config["WorkingDir"],
                "capabilities": capabilities,
                "noNewPrivileges": true,
            },
            "root": { "path": self.root, "readonly": true },
            "hostname": "pointsman",
            "mounts": all.collect::<Vec<_>>(),
            "linux": Self::linux(network),
        });
        fs::write(dir.join("config.json"), config.to_string())?;
        Ok(dir)
    }

    fn file_systems(&self) -> Vec<Value> {
        let (user, group) = (format!("uid={}", self.user), format!("gid={}", self.group));
        vec![
            json!({ "destination": "/proc", "type": "proc", "source": "proc" }),
            json!({
                "destination": "/dev",
                "type": "tmpfs",
                "source": "tmpfs",
                "options": ["nosuid", "strictatime", "mode=755", "size=65536k"],
            }),
            json!({
                "destination": "/var/cache/pointsman",
                "type": "tmpfs",
                "source": "tmpfs",
                "options": ["nosuid", "nodev", "mode=0700", user.as_str(), group.as_str()],
            }),
        ]
    }

    fn linux(network: Network) -> Value {
        let mut namespaces = vec!["mount", "pid", "ipc", "uts"];
        if network == Network::Own {
            namespaces.push("network");
        }
        let namespaces: Vec<Value> = namespaces.into_iter().map(|kind| json!({ "type": kind })).collect();
        json!({ "namespaces": namespaces })
    }
}

fn strings(list: &Value) -> Vec<String> {
    let list = list.as_array().into_iter().flatten();
    list.filter_map(|word| word.as_str().map(str::to_owned)).collect()
}

/// Returns the path of the blob that a descriptor names, if the blob has that digest and size.
fn blob(layout: &Path, descriptor: &Value) -> anyhow::Result<PathBuf> {
    let digest = descriptor["digest"].as_str().and_then(|digest| digest.strip_prefix("sha256:"));
    let digest = digest.context("a descriptor has no SHA-256")?;
    let path = layout.join("blobs/sha256").join(digest);
    let content = fs::read(&path).with_context(|| format!("could not read {}", path.display()))?;
    let found = sha256(&content);
    ensure!(found == digest, "blob {digest} has the digest {found}");
    ensure!(descriptor["size"] == content.len() as u64, "blob {digest} has {} bytes", content.len());
    Ok(path)
}

fn extract(options: &[&str], archive: &Path, dir: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(dir)?;
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--preserve-permissions"]).args(options);
    sh::run(tar.arg("--file").arg(archive).arg("--directory").arg(dir))
}
