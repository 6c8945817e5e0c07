//! The attribute `section`: a struct whose fields are the keys of one table of a configuration.
//!
//! ```ignore
//! /// Probes of workers.
//! #[section]
//! pub struct Probe {
//!     /// Interval of health checks.
//!     #[key(default = secs(2), positive)]
//!     pub interval: Duration,
//!     /// Maximum number of probe requests per second.
//!     #[key(default = 1_000, range = 1.., reason = "would never check a worker")]
//!     pub max_per_second: u32,
//! }
//! ```
//!
//! The field is the only place of a key: from it come deserialization, the default, the JSON Schema, the
//! check of the range, and what a reload reports and applies. `#[section(restart)]` means that no key of the
//! table is reloaded, `#[section(rules)]` that the table has a method `rules` for what concerns several keys.
//!
//! | `#[key(…)]` | meaning |
//! | --- | --- |
//! | `default = EXPR` | the default; without it, the type's default |
//! | `range = A..=B`, `range = A..` | values that are allowed; for an `Option`, of its content |
//! | `positive` | more than zero |
//! | `reason = "…"` | what is wrong with a value outside the range: "`0` REASON: expected …" |
//! | `example = "…"` | value that the reference shows when there is no default; of a map, an entry's name |
//! | `restart` | a reload does not apply it |
//! | `nested` | the value has sections, which are checked, too |
//! | `by_key` | a reload reports the keys of these sections, not the section as a whole |
//! | `read` | a reload reports it by the content of the files that it names |
//! | `changes = PATH` | function that reports what a reload changes |

use proc_macro::TokenStream;
use proc_macro2::TokenStream as Tokens;
use quote::quote;

mod field;

use field::Field;

/// Defines a table of the configuration; see the documentation of the crate.
#[proc_macro_attribute]
pub fn section(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let mut options = Options::default();
    let parser = syn::meta::parser(|meta| options.read(&meta));
    syn::parse_macro_input!(arguments with parser);
    let item = syn::parse_macro_input!(item as syn::ItemStruct);
    expand(&options, item).unwrap_or_else(syn::Error::into_compile_error).into()
}

/// The arguments of the attribute.
#[derive(Default)]
struct Options {
    restart: bool,
    rules: bool,
}

impl Options {
    fn read(&mut self, meta: &syn::meta::ParseNestedMeta<'_>) -> syn::Result<()> {
        match meta.path.get_ident().map(ToString::to_string).as_deref() {
            Some("restart") => self.restart = true,
            Some("rules") => self.rules = true,
            _ => return Err(meta.error("unknown argument: expected `restart` or `rules`")),
        }
        Ok(())
    }
}

fn expand(options: &Options, item: syn::ItemStruct) -> syn::Result<Tokens> {
    let syn::ItemStruct { attrs, vis, ident, fields, .. } = item;
    let mut read = Vec::new();
    for (position, field) in fields.into_iter().enumerate() {
        read.push(Field::new(field, position, options.restart)?);
    }
    let declarations = read.iter().map(Field::declaration);
    let defaults = read.iter().map(|field| {
        let (name, default) = (&field.name, field.default());
        quote! { #name: #default }
    });
    let (checks, changes) = (read.iter().map(Field::check), read.iter().map(Field::changes));
    let kept = read.iter().map(Field::keep_started);
    let rules = options.rules.then(|| quote! { self.rules(report); });
    Ok(quote! {
        #(#attrs)*
        #[derive(Clone, Debug, PartialEq, ::serde::Deserialize, ::serde::Serialize, ::schemars::JsonSchema)]
        #[serde(default, deny_unknown_fields)]
        #vis struct #ident { #(#declarations,)* }

        impl ::core::default::Default for #ident {
            fn default() -> Self {
                Self { #(#defaults,)* }
            }
        }

        impl ::pointsman_config_file::Section for #ident {
            fn check(&mut self, report: &mut ::pointsman_config_file::Report<'_>) {
                #(#checks)*
                #rules
                let _ = report;
            }
        }

        impl ::pointsman_config_file::Compared for #ident {
            #[allow(clippy::float_cmp, reason = "compares what two files say")]
            fn changes(&self, new: &Self, path: &str, changes: &mut ::pointsman_config_file::Changes) {
                #(#changes)*
                let _ = (new, path, changes);
            }

            fn keep_started(&mut self, started: &Self) {
                #(#kept)*
                let _ = started;
            }
        }
    })
}
