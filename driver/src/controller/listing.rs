//! ListVolumes and the other lists: of one server, or of all instances in sequence, ordered by name.

use forebay_proto::csi::{ListVolumesRequest, ListVolumesResponse, list_volumes_response};

use super::ControllerService;
use super::home::{Home, Servers};
use crate::cluster::{Clusters, instances};
use crate::error::Error;
use crate::handle::InstanceName;
use crate::limits::LIST_ENTRIES_MAX;

/// Prefix of all page tokens. A server accepts any volume's ID as a token; the prefix identifies foreign ones.
const TOKEN_PREFIX: &str = "after:";

impl ControllerService {
    /// CSI ListVolumes.
    pub(super) async fn list(&self, request: ListVolumesRequest) -> Result<ListVolumesResponse, Error> {
        let size = page_size(request.max_entries)?;
        let token = token_in(&request.starting_token)?;
        let (entries, next) = match &self.servers {
            Servers::One(admin) => page(Home::only(admin), size, token.to_owned()).await?,
            Servers::Kubernetes(clusters) => list_in_clusters(clusters, size, token, page).await?,
        };
        Ok(ListVolumesResponse { entries, next_token: token_out(&next) })
    }
}

/// Converts CSI's max_entries; 0 means no limit.
pub(super) fn page_size(max_entries: i32) -> Result<u32, Error> {
    u32::try_from(max_entries).map_err(|_| Error::invalid("max_entries", "is negative"))
}

/// Reverses [`token_out`].
pub(super) fn token_in(token: &str) -> Result<&str, Error> {
    match token {
        "" => Ok(""),
        token => token.strip_prefix(TOKEN_PREFIX).ok_or(Error::UnknownToken),
    }
}

/// The token for CSI's callers.
pub(super) fn token_out(token: &str) -> String {
    match token {
        "" => String::new(),
        token => format!("{TOKEN_PREFIX}{token}"),
    }
}

/// One page of one server's volumes and the token of the next.
async fn page(
    home: Home,
    size: u32,
    token: String,
) -> Result<(Vec<list_volumes_response::Entry>, String), Error> {
    let page = home.admin.list(size, token).await?;
    let advertised = home.advertised(&page.volumes).await?;
    let entries = page.volumes.iter().map(|volume| list_volumes_response::Entry {
        volume: Some(home.to_csi(volume, &advertised)),
        status: None,
    });
    Ok((entries.collect(), page.next_page_token))
}

/// A page over all instances. A token is `<instance>/<token of that instance>`. Fails if one instance does not respond: callers
/// would treat missing entries as deleted. `page` requests a page from one instance.
pub(super) async fn list_in_clusters<T, F>(
    clusters: &Clusters,
    page_size: u32,
    token: &str,
    page: impl Fn(Home, u32, String) -> F,
) -> Result<(Vec<T>, String), Error>
where
    F: Future<Output = Result<(Vec<T>, String), Error>>,
{
    let start = match token {
        "" => None,
        token => Some(parse_token(token).ok_or(Error::UnknownToken)?),
    };
    let limit = match page_size {
        0 => LIST_ENTRIES_MAX,
        size => usize::try_from(size).unwrap_or(usize::MAX).min(LIST_ENTRIES_MAX),
    };
    let listed = clusters.list().await?;
    let mut all: Vec<_> = listed
        .iter()
        .flat_map(|cluster| instances(cluster).map(move |(name, status)| (name, status, cluster)))
        // An instance that was never placed cannot have any entries.
        .filter(|(_, status, _)| !(status.node.is_empty() && status.admin_endpoint.is_empty()))
        .filter(|(name, ..)| start.as_ref().is_none_or(|(first, _)| name >= first))
        .collect();
    all.sort_by(|(a, ..), (b, ..)| a.cmp(b));

    let mut entries = Vec::new();
    for (name, _, cluster) in all {
        let mut token = match &start {
            Some((first, token)) if *first == name => (*token).to_owned(),
            _ => String::new(),
        };
        let home = Home::on(clusters, cluster, &name).await;
        loop {
            let left = limit - entries.len();
            if left == 0 {
                return Ok((entries, format!("{name}/{token}")));
            }
            let size = u32::try_from(left).unwrap_or(u32::MAX);
            let (more, next) = match &home {
                Ok(home) => page(home.clone(), size, token).await?,
                Err(error) => return Err(Error::NotNow(error.to_string())),
            };
            entries.extend(more);
            if next.is_empty() {
                break;
            }
            token = next;
        }
    }
    Ok((entries, String::new()))
}

fn parse_token(token: &str) -> Option<(InstanceName, &str)> {
    let (instance, token) = token.split_once('/')?;
    Some((InstanceName::parse(instance)?, token))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pagination_tokens_contain_the_instance() {
        let parsed = parse_token("c-0/pvc-1").expect("a token");
        assert_eq!((parsed.0.as_str(), parsed.1), ("c-0", "pvc-1"));
        assert_eq!(parse_token("c-1/").map(|t| t.1.to_owned()), Some(String::new()));
        for bad in ["", "pvc-1", "c/x", "/x"] {
            assert!(parse_token(bad).is_none(), "{bad}");
        }
    }
}
