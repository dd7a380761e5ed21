//! Endpoints (`v1`): Kubernetes mirrors them into EndpointSlices if their Service has no selector.

use std::fmt;

use serde_json::{Value, json};

use super::{Object, Origin, Problem, object};
use crate::kubernetes::EndpointSlice;
use crate::yaml::{Document, Lines};
use crate::{Key, Kind, Resource};

/// A skipped object that no verdict depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    /// Its `apiVersion`.
    pub api_version: String,
    /// Its `kind`.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// Where it was written.
    pub origin: Origin,
}

impl Skipped {
    pub(super) fn new(file: &str, document: &Document) -> Self {
        let text = |pointer: &str| {
            document.value.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
        };
        Self {
            api_version: text("/apiVersion"),
            kind: text("/kind"),
            name: text("/metadata/name"),
            origin: Origin { file: file.to_owned(), line: document.lines.first },
        }
    }
}

/// Endpoints, with the slices that mirror them.
pub(super) struct Endpoints {
    pub(super) service: Key,
    pub(super) origin: Origin,
    pub(super) slices: Vec<Object>,
    /// Their record if they are not mirrored.
    pub(super) skipped: Skipped,
}

impl fmt::Display for Endpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoints {}/{}", self.service.namespace, self.service.name)
    }
}

impl Endpoints {
    /// Parses them; problems concern the object as a whole.
    pub(super) fn read(file: &str, document: &Document, skipped: Skipped) -> Result<Self, Vec<Problem>> {
        let text = |pointer: &str| {
            let text = document.value.pointer(pointer).and_then(Value::as_str);
            text.filter(|text| !text.is_empty())
        };
        let namespace = text("/metadata/namespace").unwrap_or("default").to_owned();
        let service = Key::namespaced(Kind::Service, namespace, text("/metadata/name").unwrap_or_default());
        let subsets = document.value["subsets"].as_array().into_iter().flatten();
        let mut slices = Vec::new();
        for (number, subset) in subsets.enumerate() {
            for (family, is_of) in [("IPv4", '.'), ("IPv6", ':')] {
                let endpoints = [("addresses", true), ("notReadyAddresses", false)].into_iter().flat_map(
                    |(field, ready)| {
                        let all = subset[field].as_array().into_iter().flatten();
                        let of_family =
                            all.filter_map(|one| one["ip"].as_str()).filter(|ip| ip.contains(is_of));
                        of_family.map(move |ip| json!({"addresses": [ip], "conditions": {"ready": ready}}))
                    },
                );
                let endpoints: Vec<Value> = endpoints.collect();
                if endpoints.is_empty() {
                    continue;
                }
                let name = format!("{}-mirrored-{}-{number}", service.name, family.to_lowercase());
                let value = json!({
                    "apiVersion": Kind::EndpointSlice.api_version(), "kind": Kind::EndpointSlice.name(),
                    "metadata": {
                        "name": name, "namespace": service.namespace,
                        "labels": {(EndpointSlice::SERVICE): service.name},
                    },
                    "addressType": family, "endpoints": endpoints,
                    "ports": subset.get("ports").cloned().unwrap_or_else(|| json!([])),
                });
                let mut lines = Lines::default();
                lines.first = document.lines.first;
                let of_subset = |mut problem: Problem| {
                    problem.object = format!("Endpoints {}/{}", service.namespace, service.name);
                    problem.field = format!("subsets[{number}].{}", problem.field);
                    problem.origin.line = document.lines.of(&problem.field);
                    problem
                };
                let slice = object(file, Document { value, lines, ..Document::default() });
                slices.push(slice.map_err(|all| all.into_iter().map(of_subset).collect::<Vec<_>>())?);
            }
        }
        Ok(Self {
            service,
            origin: Origin { file: file.to_owned(), line: document.lines.first },
            slices,
            skipped,
        })
    }

    /// Whether others have equal slices.
    pub(super) fn has_slices_of(&self, other: &Self) -> bool {
        let values = |of: &Self| of.slices.iter().map(|slice| slice.value.clone()).collect::<Vec<_>>();
        values(self) == values(other)
    }

    /// Whether Kubernetes mirrors them: their Service exists, has no selector, and has no slices.
    pub(super) fn are_mirrored(&self, objects: &[Object]) -> bool {
        let Key { namespace, name, .. } = &self.service;
        let is_slice = |object: &Object| match &object.resource {
            Resource::EndpointSlice(slice) => {
                object.key.namespace == *namespace && slice.service() == Some(name.as_str())
            }
            _ => false,
        };
        let service = objects.iter().find(|object| object.key == self.service);
        let has_selector = |service: &Object| {
            service
                .value
                .pointer("/spec/selector")
                .and_then(Value::as_object)
                .is_some_and(|of| !of.is_empty())
        };
        service.is_some_and(|service| !has_selector(service)) && !objects.iter().any(is_slice)
    }
}
