//! Profile handlers: which profile becomes which slot, and when prefill is remote.

use super::{
    Import,
    config::{Config, Entry, Plugin, Profile},
    profile::is_part,
};
use crate::{
    draft::DECODE_OVERRIDE,
    report::{Kind, Place, plain},
    yaml::Node,
};

/// The largest number of a setting.
const ALL: i64 = 4_294_967_295;

/// Types of handlers.
const HANDLERS: [&str; 5] = [
    "single-profile-handler",
    "disagg-profile-handler",
    "pd-profile-handler",
    "data-parallel-profile-handler",
    "header-profile-handler",
];

/// Names of the profiles and the decider of a handler for prefill and decode.
struct Stages<'a> {
    decode: &'a str,
    prefill: &'a str,
    decider: Option<&'a str>,
    encodes: bool,
}

impl Import<'_> {
    /// Translates all profiles.
    pub(super) fn profiles(&mut self) -> anyhow::Result<()> {
        let config = self.config;
        let handler = config.plugins.iter().find(|plugin| HANDLERS.contains(&plugin.kind));
        match handler {
            Some(handler) if matches!(handler.kind, "disagg-profile-handler" | "pd-profile-handler") => {
                self.stages(handler)
            }
            _ => self.single(handler),
        }
    }

    /// One profile for all requests.
    fn single(&mut self, handler: Option<&Plugin<'_>>) -> anyhow::Result<()> {
        let config = self.config;
        if let Some(handler) = handler {
            self.handler(handler);
        }
        let implied = implied_profile(config);
        let (first, others) = match config.profiles.split_first() {
            Some((first, others)) => (first, others),
            None => (&implied, &[][..]),
        };
        self.profile(first, &["aggregated", "decode"])?;
        for profile in others {
            let ours =
                "left out: a slot runs one rule; a slot of a model ([models.NAME.slots]) may run another";
            self.leave_out(profile, ours);
        }
        Ok(())
    }

    /// Reports a profile that becomes no slot, and its entries.
    fn leave_out(&mut self, profile: &Profile<'_>, ours: &str) {
        let name = format!("profile `{}`", plain(profile.name));
        for entry in &profile.entries {
            let theirs = format!("`{}` of the {name}", plain(entry.plugin));
            self.report.add(Kind::Missing, entry.place, theirs, "left out with its profile");
        }
        self.report.add(Kind::Missing, Place::Line(profile.line), name, ours);
    }

    /// A handler that chooses no second worker.
    fn handler(&mut self, handler: &Plugin<'_>) {
        let (kind, ours) = match handler.kind {
            "single-profile-handler" => (Kind::Translated, "one profile: the slots aggregated and decode"),
            "data-parallel-profile-handler" => (
                Kind::Approximated,
                "set dp_size of each worker; the gateway chooses the rank and calls the engine's own port",
            ),
            _ => (
                Kind::Missing,
                "headers do not choose the rule: the first profile serves all requests; models may have \
                 slots",
            ),
        };
        handler.read_all();
        self.note_translation(handler, kind, ours);
    }

    /// Profiles of prefill and decode.
    fn stages(&mut self, handler: &Plugin<'_>) -> anyhow::Result<()> {
        let config = self.config;
        let stages = stages_of(handler);
        let decode = config.profile(stages.decode);
        let decode = decode.ok_or_else(|| {
            anyhow::anyhow!("{}: no profile has the name `{}`", handler.place, plain(stages.decode))
        })?;
        let prefill = config.profile(stages.prefill);
        let prefill_first = handler.text("stageOrder").is_some_and(|order| order == "prefill-first");
        let order = if prefill_first { "prefill-first" } else { "decode-first" };
        if let Some(prefill) = prefill {
            self.draft.set("routing", "order", order, format!("{}, {}", plain(handler.name), handler.place));
            self.profile(prefill, &["prefill"])?;
            self.profile(decode, &["decode", "aggregated"])?;
        } else {
            self.profile(decode, &["decode", "aggregated"])?;
        }
        for profile in &config.profiles {
            if profile.name != stages.decode && profile.name != stages.prefill {
                let ours =
                    "left out: there are the legs prefill and decode; the prefill worker encodes images";
                self.leave_out(profile, ours);
            }
        }
        if stages.encodes {
            let ours = "prefill and decode as below; the encode stage has no counterpart, see its decider";
            self.note_translation(handler, Kind::Approximated, ours);
        } else {
            self.note_translation(
                handler,
                Kind::Translated,
                format!("the slots prefill and decode, order = \"{order}\""),
            );
        }
        match prefill {
            // llm-d takes no decider when prefill comes first.
            Some(_) if prefill_first => self.draft.always_remote("stageOrder: prefill-first"),
            Some(_) => self.decider(handler, stages.decider)?,
            None => {}
        }
        Ok(())
    }

    /// When prefill is remote.
    fn decider(&mut self, handler: &Plugin<'_>, name: Option<&str>) -> anyhow::Result<()> {
        let config = self.config;
        let old_threshold = handler.number("threshold")?;
        let decider = name.and_then(|name| config.plugin(name));
        match (decider, old_threshold) {
            (Some(decider), _) if decider.kind == "prefix-based-pd-decider" => self.by_prefix(decider),
            (Some(decider), _) if decider.kind == "always-disagg-pd-decider" => {
                self.draft.always_remote(plain(decider.name));
                self.note_translation(
                    decider,
                    Kind::Translated,
                    "policies.slots.decode-override: every prefill is remote",
                );
                Ok(())
            }
            (Some(decider), _) => {
                decider.read_all();
                self.draft.always_remote(plain(decider.name));
                self.note_translation(
                    decider,
                    Kind::Missing,
                    "its type is not known: every prefill is remote",
                );
                Ok(())
            }
            // An earlier version: the handler decides itself, by bytes.
            (None, Some(bytes)) if handler.kind == "pd-profile-handler" => {
                handler.param("hashBlockSize");
                self.by_bytes(handler, bytes);
                Ok(())
            }
            (None, _) if handler.kind == "pd-profile-handler" => {
                anyhow::bail!(
                    "{}: no plugin has the name `{}`",
                    handler.place,
                    plain(name.unwrap_or_default())
                )
            }
            (None, _) => {
                self.override_of(ALL, 0, "no deciders.prefill: llm-d never splits a request");
                self.report.add(
                    Kind::Translated,
                    handler.place,
                    "no deciders.prefill",
                    "every request stays on its decode worker, as in llm-d; set enabled = false in the override \
                     to split requests",
                );
                Ok(())
            }
        }
    }

    fn by_prefix(&mut self, decider: &Plugin<'_>) -> anyhow::Result<()> {
        let new = decider.count("nonCachedTokens")?.unwrap_or(0);
        let prompt = decider.count("promptTokens")?.unwrap_or(0);
        let source = plain(decider.name);
        let (new, ours) = match new {
            0 => (ALL, "nonCachedTokens is 0: llm-d never splits a request, and neither does the override"),
            new => (
                i64::from(new),
                "policies.slots.decode-override: local below nonCachedTokens new tokens. Tokens count as in \
                 routing.bytes_per_token, or exactly with models.NAME.tokenizer",
            ),
        };
        self.override_of(new, i64::from(prompt), &source);
        self.note_translation(decider, Kind::Translated, ours);
        Ok(())
    }

    fn by_bytes(&mut self, handler: &Plugin<'_>, bytes: f64) {
        #[expect(clippy::cast_possible_truncation, reason = "clamped to the range of a u32")]
        let tokens = (bytes / 4.0).ceil().clamp(0.0, f64::from(u32::MAX)) as i64;
        let ours = if tokens > 0 {
            self.override_of(tokens, 0, "threshold / 4 bytes");
            format!("local below {tokens} new tokens: the threshold is in bytes, 4 for each token")
        } else {
            self.draft.always_remote("threshold 0");
            "policies.slots.decode-override: every prefill is remote".to_owned()
        };
        self.report.add(Kind::Approximated, handler.place, format!("threshold {bytes}"), ours);
    }

    /// Writes the override: local below `new` new tokens or a prompt of `prompt` tokens, whatever the load.
    fn override_of(&mut self, new: i64, prompt: i64, source: &str) {
        self.draft.set(DECODE_OVERRIDE, "builtin", "conditional-disagg", source);
        let load = "llm-d does not look at the load";
        self.draft
            .table(&format!("{DECODE_OVERRIDE}.settings"))
            .set("enabled", true, "")
            .set("max-new-tokens", new, source)
            .set("max-new-share", 1.0, "any share of the prompt")
            .set("local-prompt-tokens", prompt, if prompt > 0 { "promptTokens" } else { "" })
            .set("decode-busy-tokens", ALL, load)
            .set("decode-busy-queue", ALL, load)
            .set("decode-busy-kv-usage", 1.0, load)
            .set("max-load-age-ms", ALL, load);
    }
}

/// Like llm-d without profiles: one profile of all filters, scorers and pickers.
fn implied_profile<'a>(config: &Config<'a>) -> Profile<'a> {
    let parts = config.plugins.iter().filter(|plugin| is_part(plugin.kind));
    let entry = |plugin: &Plugin<'a>| Entry { plugin: plugin.name, place: plugin.place, weight: None };
    Profile { name: "default", line: config.root.line, entries: parts.map(entry).collect() }
}

/// Reads the names of a handler's profiles and its decider, in the current and the earlier spelling.
fn stages_of<'a>(handler: &Plugin<'a>) -> Stages<'a> {
    let nested = |map: &str, key: &str| handler.param(map).and_then(|map| map.get(key)).and_then(Node::text);
    let name = |key: &str, old: &str, default: &'static str| {
        let old = handler.text(old);
        nested("profiles", key).or(old).unwrap_or(default)
    };
    let old = handler.text("deciderPluginName");
    let old = handler.text("prefillDeciderPluginName").or(old);
    let default = (handler.kind == "pd-profile-handler").then_some("prefix-based-pd-decider");
    let old_encode = handler.text("encodeDeciderPluginName");
    for key in [
        "encodeProfile",
        "prefixPluginType",
        "prefixPluginName",
        "primaryPort",
        "prefixMatchInfoProducerName",
    ] {
        handler.param(key);
    }
    Stages {
        decode: name("decode", "decodeProfile", "decode"),
        prefill: name("prefill", "prefillProfile", "prefill"),
        decider: nested("deciders", "prefill").or(old).or(default),
        encodes: nested("deciders", "encode").or(old_encode).is_some(),
    }
}
