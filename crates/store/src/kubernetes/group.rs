//! The group of the API in which Calico keeps its kinds.

use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

/// A group of the API with Calico's kinds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CalicoGroup {
    /// `crd.projectcalico.org/v1`: most metadata is in an annotation, and uids are transformed.
    #[default]
    Crd,
    /// `projectcalico.org/v3`: objects are as users write them.
    Native,
}

impl CalicoGroup {
    /// The `apiVersion` of its objects.
    #[must_use]
    pub fn api_version(self) -> &'static str {
        match self {
            CalicoGroup::Crd => "crd.projectcalico.org/v1",
            CalicoGroup::Native => "projectcalico.org/v3",
        }
    }

    /// The name without the version.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.api_version().split('/').next().unwrap_or_default()
    }
}

impl fmt::Display for CalicoGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.api_version())
    }
}

impl FromStr for CalicoGroup {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let all = [CalicoGroup::Crd, CalicoGroup::Native];
        let found = all.into_iter().find(|group| group.api_version() == text.to_lowercase());
        found.ok_or_else(|| format!("{text:?} is neither {} nor {}", all[0], all[1]))
    }
}

/// What is known of the group. Clones of a client share it.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// The group that the operator has chosen.
    chosen: Option<CalicoGroup>,
    /// The group that was found.
    found: Mutex<Option<CalicoGroup>>,
}

impl Groups {
    pub(super) fn chosen(group: CalicoGroup) -> Self {
        Self { chosen: Some(group), found: Mutex::default() }
    }

    pub(super) fn known(&self) -> Option<CalicoGroup> {
        self.chosen.or(*self.found.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A kind is absent, so its group may have been removed: it is looked for again.
    pub(super) fn forget(&self) {
        self.set(None);
    }

    pub(super) fn set(&self, group: Option<CalicoGroup>) {
        *self.found.lock().unwrap_or_else(PoisonError::into_inner) = group;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_chosen_by_its_version() {
        for group in [CalicoGroup::Crd, CalicoGroup::Native] {
            assert_eq!(group.to_string().parse(), Ok(group));
            assert_eq!(group.to_string().to_uppercase().parse(), Ok(group));
        }
        assert!("projectcalico.org/v1".parse::<CalicoGroup>().is_err());
    }

    #[test]
    fn a_chosen_group_is_not_forgotten() {
        let (chosen, found) = (Groups::chosen(CalicoGroup::Native), Groups::default());
        found.set(Some(CalicoGroup::Crd));
        assert_eq!((chosen.known(), found.known()), (Some(CalicoGroup::Native), Some(CalicoGroup::Crd)));
        chosen.forget();
        found.forget();
        assert_eq!((chosen.known(), found.known()), (Some(CalicoGroup::Native), None));
    }
}
