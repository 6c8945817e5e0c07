//! The container image and the Debian package, as far as their sources tell.

use std::{collections::BTreeMap, path::PathBuf};

use clap::Parser as _;
use pointsman_gateway::{cli::Cli, config::Config};
use toml::Value;

fn path(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join(name)
}

fn read(name: &str) -> String {
    std::fs::read_to_string(path(name)).unwrap()
}

/// Instructions of a Dockerfile: keyword and argument, one for each line that is not continued.
fn instructions(text: &str) -> Vec<(String, String)> {
    let text = text.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n");
    let joined = text.replace("\\\n", " ");
    let split = |line: &str| {
        let (keyword, argument) = line.split_once(' ')?;
        Some((keyword.to_owned(), argument.split_whitespace().collect::<Vec<_>>().join(" ")))
    };
    joined.lines().filter_map(split).collect()
}

fn words(json: &str) -> Vec<String> {
    serde_json::from_str(json).unwrap()
}

#[test]
fn n5_the_image_runs_without_root_and_shell_and_its_commands_exist() {
    let all = instructions(&read("deploy/container/Dockerfile"));
    let last = all.iter().rposition(|(keyword, _)| keyword == "FROM").unwrap();
    let (build, image) = all.split_at(last);
    let toolchain: Value = toml::from_str(&read("rust-toolchain.toml")).unwrap();
    let channel = toolchain["toolchain"]["channel"].as_str().unwrap();
    assert_eq!(build[0].1, format!("docker.io/library/rust:{channel}-bookworm AS build"));
    // N5.1
    assert!(image[0].1.starts_with("gcr.io/distroless/cc-debian12:"), "{:?}", image[0]);
    assert!(image.iter().all(|(keyword, _)| keyword != "RUN"), "the image has no shell to run it");
    let image: BTreeMap<_, _> =
        image.iter().map(|(keyword, rest)| (keyword.as_str(), rest.as_str())).collect();
    let (user, group) = image["USER"].split_once(':').unwrap();
    let (user, group): (u32, u32) = (user.parse().unwrap(), group.parse().unwrap());
    // N5.1
    assert!(user != 0 && group != 0);
    let cache = format!("--from=build --chown={user}:{group} /cache/ /var/cache/");
    let mut copies = all[last..].iter().filter(|(keyword, _)| keyword == "COPY").map(|(_, rest)| rest);
    assert!(copies.any(|copy| *copy == cache), "{cache}");
    assert_eq!(image["STOPSIGNAL"], "SIGTERM");
    assert!(image["LABEL"].contains("org.opencontainers.image.licenses=\"Apache-2.0\""));
    let entry = words(image["ENTRYPOINT"]);
    let check = words(image["HEALTHCHECK"].split_once("CMD ").unwrap().1);
    let serve = [entry.clone(), words(image["CMD"])].concat();
    for command in [&serve, &check] {
        assert_eq!(command[0], entry[0]);
        // N5.2
        assert!(Cli::try_parse_from(command).is_ok(), "{command:?}");
    }
    let run = &build.iter().rfind(|(keyword, _)| keyword == "RUN").unwrap().1;
    for source in run.split_whitespace().filter(|word| word.starts_with("deploy/")) {
        assert!(path(source).is_file(), "{source}");
    }
}

#[test]
fn n5_the_installed_configuration_is_valid_and_names_what_is_installed() {
    let text = read("deploy/etc/pointsman.toml");
    let uncommented: String =
        text.lines().map(|line| format!("{}\n", line.trim_start_matches("# "))).collect();
    let example = &uncommented[uncommented.find("[[workers]]").unwrap()..];
    let with_worker: Config = toml::from_str(&format!("{text}{example}")).unwrap();
    assert_eq!(with_worker.workers.len(), 1);
    let config: Config = toml::from_str(&text).unwrap();
    // N5.2
    assert_eq!(config.policies.dir.unwrap(), PathBuf::from("/etc/pointsman/policies.d"));
    assert_eq!(config.policies.compile_cache.unwrap(), PathBuf::from("/var/cache/pointsman"));
    let dockerfile = read("deploy/container/Dockerfile");
    for made in ["/out/etc/pointsman/policies.d ", "/cache/pointsman"] {
        assert!(dockerfile.contains(made), "{made}");
    }
    let unit = read("deploy/systemd/pointsman.service");
    for line in [
        "CacheDirectory=pointsman",
        "ExecStart=/usr/bin/pointsman serve --config /etc/pointsman/pointsman.toml",
    ] {
        // N5.3
        assert!(unit.lines().any(|own| own == line), "{line}");
    }
}

#[test]
fn n5_every_file_of_the_debian_package_exists() {
    let manifest: Value = toml::from_str(&read("host/gateway/Cargo.toml")).unwrap();
    let assets = manifest["package"]["metadata"]["deb"]["assets"].as_array().unwrap();
    let mut installed = Vec::new();
    for asset in assets {
        let [source, to] = [0, 1].map(|index| asset[index].as_str().unwrap());
        if let Some(name) = source.strip_prefix("../../") {
            // N5.3
            assert!(path(name).is_file(), "{source}");
        } else {
            assert!(source.starts_with("target/release/"), "{source}");
        }
        let name = if to.ends_with('/') { source.rsplit('/').next().unwrap() } else { "" };
        installed.push(format!("/{to}{name}"));
    }
    installed.sort();
    let count = installed.len();
    installed.dedup();
    assert_eq!(installed.len(), count, "two files have one path");
    let unit = read("deploy/systemd/pointsman.service");
    let documented = unit.lines().find_map(|line| line.strip_prefix("Documentation=")).unwrap();
    let document = documented.split(' ').find_map(|url| url.strip_prefix("file://")).unwrap();
    let programs = ["lab", "policy", "tools"].map(|name| format!("/usr/bin/pointsman-{name}"));
    let programs = programs.iter().map(String::as_str);
    for needed in programs.chain(["/usr/bin/pointsman", "/etc/pointsman/pointsman.toml", document]) {
        // N5.3
        assert!(installed.iter().any(|path| path == needed), "{needed}");
    }
}
