//! Converts the policies of manifests, and leaves other objects as they are.

use serde_json::{Value, json};

use super::{Origin, Problem, describe, documents, meaning, object, problem, shortened};
use crate::convert::{calico_spec, kubernetes_policy};
use crate::yaml::Document;
use crate::{FieldError, Kind, Resource, spelling};

/// The form that policies get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyForm {
    /// Calico's API v3, from Kubernetes' policies.
    Calico,
    /// Kubernetes' policies, from Calico's.
    Kubernetes,
}

/// The objects of a converted file.
#[derive(Debug, Default)]
pub struct ConvertedFile {
    /// The objects, in their order.
    pub objects: Vec<Value>,
    /// What a policy loses that may change verdicts in some clusters.
    pub losses: Vec<Problem>,
    /// What a policy loses without effect on its verdicts between pods.
    pub notes: Vec<Problem>,
}

/// Converts the documents of one file.
///
/// # Errors
/// Every problem of the file, and every field that the other form does not have.
pub fn convert(file: &str, text: &str, form: PolicyForm) -> Result<ConvertedFile, Vec<Problem>> {
    let (mut converted, mut problems) = (ConvertedFile::default(), Vec::new());
    for document in documents(file, text, &mut problems) {
        match one(file, document, form, &mut converted.losses, &mut converted.notes) {
            Ok(value) => converted.objects.push(value),
            Err(more) => problems.extend(more),
        }
    }
    if problems.is_empty() { Ok(converted) } else { Err(problems) }
}

fn one(
    file: &str,
    document: Document,
    form: PolicyForm,
    losses: &mut Vec<Problem>,
    notes: &mut Vec<Problem>,
) -> Result<Value, Vec<Problem>> {
    if meaning::is_left_out(&document.value) {
        return Ok(document.value);
    }
    if is_of_v1(&document.value) {
        let error =
            FieldError::new("apiVersion", "is of Calico's API v1; `calicoctl convert` makes v3 of it");
        return Err(vec![problem(file, &document, &describe(&document.value), error)]);
    }
    let object = object(file, document)?;
    let at = |error: FieldError| Problem {
        origin: Origin { line: object.lines.of(&error.path), ..object.origin.clone() },
        object: shortened(&object.key.to_string()),
        field: error.path,
        problem: error.problem,
    };
    match (form, &object.resource) {
        (PolicyForm::Calico, Resource::KubernetesNetworkPolicy(policy)) => {
            let mut value = json!({
                "apiVersion": Kind::NetworkPolicy.api_version(), "kind": Kind::NetworkPolicy.name(),
                "metadata": object.value["metadata"],
            });
            value["spec"] = calico_spec(policy);
            Ok(value)
        }
        (PolicyForm::Kubernetes, Resource::NetworkPolicy(policy)) => match kubernetes_policy(policy) {
            Ok(converted) => {
                losses.extend(converted.losses.into_iter().map(at));
                notes.extend(converted.notes.into_iter().map(at));
                Ok(converted.value)
            }
            Err(errors) => Err(errors.into_iter().map(at).collect()),
        },
        (PolicyForm::Kubernetes, _)
            if object.key.kind.is_policy() && object.key.kind != Kind::KubernetesNetworkPolicy =>
        {
            let problem = format!("no Kubernetes NetworkPolicy says what a {} says", object.key.kind.name());
            Err(vec![at(FieldError::new("kind", problem))])
        }
        _ => {
            let mut value = object.value;
            spelling::correct(object.key.kind, &mut value);
            Ok(value)
        }
    }
}

/// Whether an object is of Calico's API v1, whose kinds begin with a small letter.
fn is_of_v1(value: &Value) -> bool {
    const KINDS: [&str; 7] =
        ["bgpPeer", "hostEndpoint", "ipPool", "node", "policy", "profile", "workloadEndpoint"];
    value["apiVersion"] == "v1" && value["kind"].as_str().is_some_and(|kind| KINDS.contains(&kind))
}
