//! One field of a section: its attribute, and the code that comes from it.

use proc_macro2::TokenStream as Tokens;
use quote::quote;
use syn::ext::IdentExt as _;
use syn::{Attribute, Expr, ExprRange, GenericArgument, LitStr, PathArguments, Type, Visibility};

/// A field with its attribute `key`.
pub(crate) struct Field {
    pub(crate) name: syn::Ident,
    /// The name as the file has it.
    text: String,
    vis: Visibility,
    ty: Type,
    attrs: Vec<Attribute>,
    key: Key,
    /// Whether the field is not a key of the file.
    skipped: bool,
    /// Position of the field in the struct.
    position: u32,
}

/// The arguments of `#[key(…)]`.
#[derive(Default)]
struct Key {
    default: Option<Expr>,
    range: Option<ExprRange>,
    reason: Option<LitStr>,
    example: Option<LitStr>,
    changes: Option<syn::Path>,
    positive: bool,
    restart: bool,
    nested: bool,
    by_key: bool,
    read: bool,
}

impl Key {
    fn read(&mut self, meta: &syn::meta::ParseNestedMeta<'_>) -> syn::Result<()> {
        match meta.path.get_ident().map(ToString::to_string).as_deref() {
            Some("default") => self.default = Some(meta.value()?.parse()?),
            Some("range") => self.range = Some(meta.value()?.parse()?),
            Some("reason") => self.reason = Some(meta.value()?.parse()?),
            Some("example") => self.example = Some(meta.value()?.parse()?),
            Some("changes") => self.changes = Some(meta.value()?.parse()?),
            Some("positive") => self.positive = true,
            Some("restart") => self.restart = true,
            Some("nested") => self.nested = true,
            Some("by_key") => self.by_key = true,
            Some("read") => self.read = true,
            _ => return Err(meta.error("unknown argument; the crate's documentation lists them")),
        }
        Ok(())
    }
}

impl Field {
    pub(crate) fn new(field: syn::Field, position: usize, restart: bool) -> syn::Result<Self> {
        let syn::Field { attrs, vis, ident, ty, .. } = field;
        let name = ident.ok_or_else(|| syn::Error::new_spanned(&ty, "a section has named fields"))?;
        let mut key = Key { restart, ..Key::default() };
        for attr in attrs.iter().filter(|attr| attr.path().is_ident("key")) {
            attr.parse_nested_meta(|meta| key.read(&meta))?;
        }
        let attrs: Vec<_> = attrs.into_iter().filter(|attr| !attr.path().is_ident("key")).collect();
        let skipped = attrs.iter().any(|attr| attr.path().is_ident("serde") && skips(attr));
        let position = u32::try_from(position).unwrap_or(u32::MAX);
        Ok(Self { text: name.unraw().to_string(), name, vis, ty, attrs, key, skipped, position })
    }

    /// The field with the attributes of serde and schemars.
    pub(crate) fn declaration(&self) -> Tokens {
        let Self { name, vis, ty, attrs, position, key, .. } = self;
        let duration = is(self.content(), "Duration").then(|| {
            let (serde, schema) = match content(ty) {
                Some(_) => ("::pointsman_config_file::duration::optional", "Option<String>"),
                None => ("::pointsman_config_file::duration", "String"),
            };
            quote! {
                #[serde(with = #serde)]
                #[schemars(with = #schema)]
            }
        });
        let mut extensions = vec![quote! { "x-position" = #position }];
        if key.restart {
            extensions.push(quote! { "x-restart" = true });
        }
        if let Some(example) = &key.example {
            extensions.push(quote! { "x-example" = #example });
        }
        if let (Some(ExprRange { start, end, .. }), Some(range)) = (&key.range, self.range()) {
            let of = self.content();
            extensions.push(quote! { "x-range" = ::pointsman_config_file::Range::<#of>::text(&#range) });
            if duration.is_none() {
                extensions.extend(start.iter().map(|start| quote! { "minimum" = #start }));
                extensions.extend(end.iter().map(|end| quote! { "maximum" = #end }));
            }
        }
        let schema = (!self.skipped).then(|| quote! { #[schemars(extend(#(#extensions),*))] });
        quote! { #(#attrs)* #duration #schema #vis #name: #ty }
    }

    pub(crate) fn default(&self) -> Tokens {
        let given = self.key.default.as_ref();
        given.map_or_else(|| quote! { ::core::default::Default::default() }, |given| quote! { #given })
    }

    /// Reports a value out of range, and puts the default in its place.
    pub(crate) fn check(&self) -> Tokens {
        let Self { name, text, ty, .. } = self;
        let default = self.default();
        let range = self.range().map(|range| {
            if is(ty, "Option") {
                quote! {
                    if self.#name.as_ref().is_some_and(|value| !report.range(#text, value, &#range)) {
                        self.#name = #default;
                    }
                }
            } else {
                quote! {
                    if !report.range(#text, &self.#name, &#range) {
                        self.#name = #default;
                    }
                }
            }
        });
        let nested = self.key.nested.then(|| {
            quote! { ::pointsman_config_file::Section::check(&mut self.#name, &mut report.at(#text)); }
        });
        quote! { #range #nested }
    }

    /// Reports whether the value differs.
    pub(crate) fn changes(&self) -> Tokens {
        let Self { name, text, key, .. } = self;
        let restart = key.restart;
        let path = quote! { ::pointsman_config_file::join(path, #text) };
        if self.skipped || key.read {
            Tokens::new()
        } else if let Some(function) = &key.changes {
            quote! { #function(&self.#name, &new.#name, &#path, changes); }
        } else if key.by_key {
            quote! { ::pointsman_config_file::Compared::changes(&self.#name, &new.#name, &#path, changes); }
        } else {
            quote! { if self.#name != new.#name { changes.add(#path, #restart); } }
        }
    }

    /// Puts the value of the start in the place of one that a reload does not apply.
    pub(crate) fn keep_started(&self) -> Tokens {
        let (name, key) = (&self.name, &self.key);
        if key.restart {
            quote! { self.#name.clone_from(&started.#name); }
        } else if key.by_key {
            quote! { ::pointsman_config_file::Compared::keep_started(&mut self.#name, &started.#name); }
        } else {
            Tokens::new()
        }
    }

    fn range(&self) -> Option<Tokens> {
        let option = |part: Option<&Expr>| match part {
            Some(part) => quote! { ::core::option::Option::Some(#part) },
            None => quote! { ::core::option::Option::None },
        };
        let reason = match &self.key.reason {
            Some(reason) => quote! { ::core::option::Option::Some(#reason) },
            None => quote! { ::core::option::Option::None },
        };
        if self.key.positive {
            return Some(quote! { ::pointsman_config_file::Range::positive(#reason) });
        }
        let ExprRange { start, end, .. } = self.key.range.as_ref()?;
        let (min, max) = (option(start.as_deref()), option(end.as_deref()));
        Some(quote! { ::pointsman_config_file::Range::new(#min, #max, #reason) })
    }

    /// Type of the field; for an `Option`, the type of its content.
    fn content(&self) -> &Type {
        content(&self.ty).unwrap_or(&self.ty)
    }
}

fn content(ty: &Type) -> Option<&Type> {
    let Type::Path(path) = ty else { return None };
    let last = path.path.segments.last().filter(|last| last.ident == "Option")?;
    let PathArguments::AngleBracketed(arguments) = &last.arguments else { return None };
    arguments.args.iter().find_map(|argument| match argument {
        GenericArgument::Type(content) => Some(content),
        _ => None,
    })
}

/// Returns whether the last name of a type is `name`.
fn is(ty: &Type, name: &str) -> bool {
    matches!(ty, Type::Path(path) if path.path.segments.last().is_some_and(|last| last.ident == name))
}

fn skips(attr: &Attribute) -> bool {
    let mut skips = false;
    let _ = attr.parse_nested_meta(|meta| {
        skips |= meta.path.is_ident("skip");
        if meta.input.peek(syn::Token![=]) {
            let _: Expr = meta.value()?.parse()?;
        }
        Ok(())
    });
    skips
}
