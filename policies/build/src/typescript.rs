//! Types of the contract in TypeScript: of the WIT, spelt as componentize-js passes them, and of the facts.

use std::fmt::Write as _;

use wit_parser::{
    Docs, Function, InterfaceId, Resolve, Type, TypeDef, TypeDefKind, TypeId, TypeOwner,
    UnresolvedPackageGroup,
};

use crate::contract::{CONTRACT, Fact, Scope, facts};

/// Name of the file with the declarations.
pub const DECLARATIONS: &str = "pointsman-contract.d.ts";

/// Returns a module for each interface of the WIT, and `pointsman:policy/facts` with the facts.
#[must_use]
pub fn declarations() -> String {
    let mut text =
        "// Types of the contract with the gateway, from its WIT and its facts. Do not edit: each release \
                    writes its own.\n"
            .to_owned();
    let mut resolve = Resolve::default();
    let package = UnresolvedPackageGroup::parse("policy.wit", CONTRACT)
        .map_err(|_| ())
        .and_then(|group| resolve.push_group(group).map_err(|_| ()));
    // It is part of this program, and a test parses it.
    if let Some(package) = package.ok().and_then(|id| resolve.packages.get(id)) {
        for id in package.interfaces.values() {
            Module { resolve: &resolve, id: *id }.write(&mut text);
        }
    }
    fact_types(&mut text);
    text
}

struct Module<'a> {
    resolve: &'a Resolve,
    id: InterfaceId,
}

impl Module<'_> {
    fn write(&self, text: &mut String) {
        let Some(interface) = self.resolve.interfaces.get(self.id) else { return };
        let name = self.resolve.id_of(self.id).unwrap_or_default();
        documented(text, "", &interface.docs);
        let _ = writeln!(text, "declare module \"{name}\" {{");
        for (name, id) in &interface.types {
            if let Some(ty) = self.resolve.types.get(*id) {
                documented(text, "  ", &ty.docs);
                self.definition(text, &pascal(name), ty);
            }
        }
        for function in interface.functions.values() {
            documented(text, "  ", &function.docs);
            let (name, signature) = (camel(&function.name), self.signature(function));
            let _ = match name.as_str() {
                // A reserved word.
                "delete" => {
                    writeln!(text, "  function _{name}{signature}\n  export {{ _{name} as {name} }};")
                }
                _ => writeln!(text, "  export function {name}{signature}"),
            };
        }
        text.push_str("}\n\n");
    }

    fn definition(&self, text: &mut String, name: &str, ty: &TypeDef) {
        match &ty.kind {
            TypeDefKind::Record(record) => {
                let _ = writeln!(text, "  export interface {name} {{");
                for field in &record.fields {
                    documented(text, "    ", &field.docs);
                    let optional = if self.is_option(field.ty) { "?" } else { "" };
                    let _ = writeln!(text, "    {}{optional}: {};", camel(&field.name), self.ty(field.ty));
                }
                text.push_str("  }\n");
            }
            TypeDefKind::Enum(cases) => {
                let cases: Vec<String> =
                    cases.cases.iter().map(|case| format!("\"{}\"", case.name)).collect();
                let _ = writeln!(text, "  export type {name} = {};", cases.join(" | "));
            }
            TypeDefKind::Variant(variant) => {
                let case = |(tag, ty): (&str, Option<Type>)| match ty {
                    Some(ty) => format!("{{ tag: \"{tag}\"; val: {} }}", self.ty(ty)),
                    None => format!("{{ tag: \"{tag}\" }}"),
                };
                let cases: Vec<String> =
                    variant.cases.iter().map(|it| case((it.name.as_str(), it.ty))).collect();
                let _ = writeln!(text, "  export type {name} = {};", cases.join(" | "));
            }
            TypeDefKind::Type(Type::Id(of)) => {
                let module = self.module_of(*of);
                let _ = writeln!(
                    text,
                    "  import type {{ {name} }} from \"{module}\";\n  export type {{ {name} }};"
                );
            }
            _ => {}
        }
    }

    fn module_of(&self, id: TypeId) -> String {
        match self.resolve.types.get(id).map(|ty| ty.owner) {
            Some(TypeOwner::Interface(interface)) => self.resolve.id_of(interface).unwrap_or_default(),
            _ => String::new(),
        }
    }

    fn signature(&self, function: &Function) -> String {
        let parameter = |(name, ty): (&str, Type)| format!("{}: {}", camel(name), self.ty(ty));
        let parameters: Vec<String> =
            function.params.iter().map(|it| parameter((it.name.as_str(), it.ty))).collect();
        let result = function.result.map_or_else(|| "void".to_owned(), |ty| self.ty(ty));
        format!("({}): {result};", parameters.join(", "))
    }

    fn is_option(&self, ty: Type) -> bool {
        let Type::Id(id) = ty else { return false };
        self.resolve.types.get(id).is_some_and(|ty| matches!(ty.kind, TypeDefKind::Option(_)))
    }

    fn ty(&self, ty: Type) -> String {
        match ty {
            Type::Bool => "boolean".to_owned(),
            Type::String | Type::Char => "string".to_owned(),
            Type::U64 | Type::S64 => "bigint".to_owned(),
            Type::Id(id) => self.resolve.types.get(id).map_or_else(String::new, |ty| self.named(ty)),
            _ => "number".to_owned(),
        }
    }

    fn named(&self, ty: &TypeDef) -> String {
        if let Some(name) = &ty.name {
            return pascal(name);
        }
        match &ty.kind {
            TypeDefKind::Option(of) => format!("{} | undefined", self.ty(*of)),
            TypeDefKind::List(Type::U8) => "Uint8Array".to_owned(),
            TypeDefKind::List(Type::U32) => "Uint32Array".to_owned(),
            TypeDefKind::List(Type::F32) => "Float32Array".to_owned(),
            TypeDefKind::List(of) => format!("{}[]", self.ty(*of)),
            // An error is thrown.
            TypeDefKind::Result(result) => result.ok.map_or_else(|| "void".to_owned(), |ok| self.ty(ok)),
            _ => "unknown".to_owned(),
        }
    }
}

/// Writes the module of the facts: for each its value, as the helper passes it.
fn fact_types(text: &mut String) {
    text.push_str(
        "/** All facts, with the types of their values. */\ndeclare module \"pointsman:policy/facts\" {\n",
    );
    for (interface, scope) in [("RequestFacts", Scope::Request), ("WorkerFacts", Scope::Worker)] {
        let _ = writeln!(text, "  export interface {interface} {{");
        for fact in facts().filter(|fact| fact.scope == scope) {
            let Fact { name, meaning, unit, .. } = fact;
            let absent = fact.absent.map(|absent| format!(" When absent: {absent}.")).unwrap_or_default();
            let _ = writeln!(text, "    /** {meaning} Unit, range: {unit}.{absent} */");
            let ty = match (scope, fact.ty) {
                (Scope::Request, "u64") => "bigint",
                (Scope::Request, _) => "number",
                (Scope::Worker, "u64") => "BigUint64Array",
                (Scope::Worker, "f32") => "Float32Array",
                (Scope::Worker, _) => "Uint32Array",
            };
            let _ = match name.split_once('<') {
                Some((prefix, rest)) => {
                    let rest = if rest.contains("=<") { "${string}=${string}" } else { "${string}" };
                    writeln!(text, "    readonly [label: `{prefix}{rest}`]: {ty};")
                }
                None => writeln!(text, "    readonly \"{name}\": {ty};"),
            };
        }
        text.push_str("  }\n");
    }
    text.push_str("}\n");
}

fn documented(text: &mut String, indent: &str, docs: &Docs) {
    let Some(docs) = &docs.contents else { return };
    let docs = docs.trim().replace("*/", "* /");
    let docs = docs.lines().map(str::trim).collect::<Vec<_>>().join(&format!("\n{indent} * "));
    let _ = writeln!(text, "{indent}/** {docs} */");
}

fn pascal(name: &str) -> String {
    name.split('-').map(capital).collect()
}

fn camel(name: &str) -> String {
    let mut words = name.split('-');
    words.next().unwrap_or_default().to_owned() + &words.map(capital).collect::<String>()
}

fn capital(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().map(|first| first.to_ascii_uppercase().to_string() + letters.as_str()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_declarations_have_the_interfaces_and_the_facts() {
        let text = declarations();
        for part in [
            "declare module \"pointsman:policy/types@0.1.1\" {",
            "export type Leg = \"aggregated\" | \"prefill\" | \"decode\";",
            "    nowUs: bigint;",
            "    overlapScoreCredit?: number | undefined;",
            "export function get(key: string): Uint8Array | undefined;",
            "function _delete(key: string): void;\n  export { _delete as delete };",
            "export function set(key: string, value: Uint8Array, ttlMs: number): void;",
            "{ tag: \"choose\"; val: Choice } | { tag: \"abstain\" } | { tag: \"shed\"; val: ShedReason }",
            "readonly \"session-hash\": bigint;",
            "readonly \"kv-usage\": Float32Array;",
            "readonly [label: `label-is/${string}=${string}`]: Uint32Array;",
            "readonly [label: `label-number/${string}`]: Float32Array;",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("unknown") && !text.contains(": ;"), "{text}");
    }
}
