//! The messages of Kerberos that a server receives and sends ([RFC 4120] 5, the module KerberosV5Spec2), in DER.

use std::fmt;

use zeroize::Zeroizing;

use super::encryption::{EncryptionType, Key};
use crate::auth::AuthError;
use crate::auth::der::{self, Reader, application, context};

/// pvno, tkt-vno and authenticator-vno.
const VERSION: i64 = 5;
const AP_REQ: u8 = 14;
const AP_REP: u8 = 15;

/// Maximum number of components of a name; a user has one, a service two.
const COMPONENTS_MAX: usize = 8;

/// `EncryptedData` (5.2.9).
#[derive(Debug)]
pub(super) struct Encrypted<'a> {
    pub(super) etype: i32,
    pub(super) version: Option<u32>,
    pub(super) cipher: &'a [u8],
}

/// `AP-REQ` (5.5.1).
#[derive(Debug)]
pub(super) struct ApReq<'a> {
    pub(super) options: Bits,
    pub(super) ticket: Ticket<'a>,
    pub(super) authenticator: Encrypted<'a>,
}

/// `Ticket` (5.3).
#[derive(Debug)]
pub(super) struct Ticket<'a> {
    pub(super) realm: String,
    pub(super) service: Vec<String>,
    pub(super) encrypted: Encrypted<'a>,
}

/// `EncTicketPart` (5.3). Times are in seconds since 1970.
#[derive(Debug)]
pub(super) struct TicketPart {
    pub(super) flags: Bits,
    pub(super) key: Key,
    pub(super) realm: String,
    pub(super) client: Vec<String>,
    pub(super) start: i64,
    pub(super) end: i64,
}

/// `Authenticator` (5.5.1).
#[derive(Debug)]
pub(super) struct Authenticator {
    pub(super) realm: String,
    pub(super) client: Vec<String>,
    pub(super) checksum: Option<(i32, Vec<u8>)>,
    pub(super) time: i64,
    pub(super) microseconds: i64,
    pub(super) subkey: Option<Key>,
}

/// A `KerberosFlags` (5.2.8): bit 0 is the most significant one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bits(pub(super) u32);

impl Bits {
    pub(super) fn has(self, bit: u32) -> bool {
        self.0 << bit >> 31 == 1
    }
}

/// `APOptions`: the ticket is encrypted with a session key, as in user-to-user authentication.
pub(super) const USE_SESSION_KEY: u32 = 1;
/// `APOptions`: the client requests an AP-REP.
pub(super) const MUTUAL_REQUIRED: u32 = 2;
/// `TicketFlags`: not valid until the KDC has validated it.
pub(super) const INVALID: u32 = 7;

impl<'a> ApReq<'a> {
    pub(super) fn parse(message: &'a [u8]) -> Result<Self, AuthError> {
        let mut fields = sequence(der::only(message, application(AP_REQ))?)?;
        expect_number(&mut fields, 0, VERSION)?;
        expect_number(&mut fields, 1, i64::from(AP_REQ))?;
        let options = bits(fields.expect(context(2))?)?;
        let ticket = Ticket::parse(fields.expect(context(3))?)?;
        let authenticator = Encrypted::parse(fields.expect(context(4))?)?;
        fields.finish()?;
        Ok(Self { options, ticket, authenticator })
    }
}

impl<'a> Ticket<'a> {
    fn parse(value: &'a [u8]) -> Result<Self, AuthError> {
        let mut fields = sequence(der::only(value, application(1))?)?;
        expect_number(&mut fields, 0, VERSION)?;
        let realm = string(fields.expect(context(1))?)?;
        let service = name(fields.expect(context(2))?)?;
        let encrypted = Encrypted::parse(fields.expect(context(3))?)?;
        fields.finish()?;
        Ok(Self { realm, service, encrypted })
    }
}

/// For administrators: the service of the ticket. Names come from the peer, so they are truncated.
impl fmt::Display for Ticket<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = format!("{}@{}", self.service.join("/"), self.realm);
        write!(f, "the ticket for {:.200}", name.escape_debug().to_string())?;
        self.encrypted.version.map_or(Ok(()), |version| write!(f, " (key version {version})"))
    }
}

impl<'a> Encrypted<'a> {
    fn parse(value: &'a [u8]) -> Result<Self, AuthError> {
        let mut fields = sequence(value)?;
        let etype = int32(fields.expect(context(0))?)?;
        let version = match fields.optional(context(1))? {
            // Some implementations write it as a signed 32-bit number.
            Some(value) => Some(number(value)? as u32),
            None => None,
        };
        let cipher = der::only(fields.expect(context(2))?, der::OCTET_STRING)?;
        fields.finish()?;
        Ok(Self { etype, version, cipher })
    }
}

impl TicketPart {
    pub(super) fn parse(plain: &[u8]) -> Result<Self, AuthError> {
        let mut fields = sequence(der::only(plain, application(3))?)?;
        let flags = bits(fields.expect(context(0))?)?;
        let key = key(fields.expect(context(1))?)?;
        let realm = string(fields.expect(context(2))?)?;
        let client = name(fields.expect(context(3))?)?;
        let _transited = fields.expect(context(4))?;
        let authenticated = time(fields.expect(context(5))?)?;
        let start = fields.optional(context(6))?.map(time).transpose()?.unwrap_or(authenticated);
        let end = time(fields.expect(context(7))?)?;
        let _renew_till = fields.optional(context(8))?;
        let _addresses = fields.optional(context(9))?;
        only_what_may_be_ignored(fields.optional(context(10))?)?;
        fields.finish()?;
        Ok(Self { flags, key, realm, client, start, end })
    }
}

impl Authenticator {
    pub(super) fn parse(plain: &[u8]) -> Result<Self, AuthError> {
        let mut fields = sequence(der::only(plain, application(2))?)?;
        expect_number(&mut fields, 0, VERSION)?;
        let realm = string(fields.expect(context(1))?)?;
        let client = name(fields.expect(context(2))?)?;
        let checksum = match fields.optional(context(3))? {
            Some(value) => {
                let mut fields = sequence(value)?;
                let kind = int32(fields.expect(context(0))?)?;
                let bytes = der::only(fields.expect(context(1))?, der::OCTET_STRING)?;
                fields.finish()?;
                Some((kind, bytes.to_vec()))
            }
            None => None,
        };
        let microseconds = number(fields.expect(context(4))?)?;
        let time = time(fields.expect(context(5))?)?;
        let subkey = fields.optional(context(6))?.map(key).transpose()?;
        let _sequence_number = fields.optional(context(7))?;
        only_what_may_be_ignored(fields.optional(context(8))?)?;
        fields.finish()?;
        Ok(Self { realm, client, checksum, time, microseconds, subkey })
    }
}

/// `EncAPRepPart` (5.5.2), to be encrypted.
pub(super) fn ap_rep_part(time: i64, microseconds: i64) -> Vec<u8> {
    let fields = der::encode(
        der::SEQUENCE,
        &[
            &der::encode(context(0), &[&encode_time(time)]),
            &der::encode(context(1), &[&encode_number(microseconds)]),
        ],
    );
    der::encode(application(27), &[&fields])
}

/// `AP-REP` (5.5.2).
pub(super) fn ap_rep(etype: EncryptionType, cipher: &[u8]) -> Vec<u8> {
    let encrypted = der::encode(
        der::SEQUENCE,
        &[
            &der::encode(context(0), &[&encode_number(etype as i64)]),
            &der::encode(context(2), &[&der::encode(der::OCTET_STRING, &[cipher])]),
        ],
    );
    let fields = der::encode(
        der::SEQUENCE,
        &[
            &der::encode(context(0), &[&encode_number(VERSION)]),
            &der::encode(context(1), &[&encode_number(i64::from(AP_REP))]),
            &der::encode(context(2), &[&encrypted]),
        ],
    );
    der::encode(application(AP_REP), &[&fields])
}

fn sequence(value: &[u8]) -> Result<Reader<'_>, AuthError> {
    der::only(value, der::SEQUENCE).map(Reader::new)
}

fn number(value: &[u8]) -> Result<i64, AuthError> {
    match der::only(value, der::INTEGER)? {
        bytes @ [first, ..] if bytes.len() <= 8 => {
            let sign = if first & 0x80 == 0 { 0 } else { -1 };
            Ok(bytes.iter().fold(sign, |number, byte| number << 8 | i64::from(*byte)))
        }
        _ => Err(AuthError::Malformed("a number of an unacceptable length")),
    }
}

fn int32(value: &[u8]) -> Result<i32, AuthError> {
    i32::try_from(number(value)?).map_err(|_| AuthError::Malformed("a number is too large"))
}

fn expect_number(fields: &mut Reader<'_>, field: u8, expected: i64) -> Result<(), AuthError> {
    if number(fields.expect(context(field))?)? == expected {
        Ok(())
    } else {
        Err(AuthError::Malformed("unexpected version or type of a Kerberos message"))
    }
}

fn string(value: &[u8]) -> Result<String, AuthError> {
    let bytes = der::only(value, der::GENERAL_STRING)?;
    String::from_utf8(bytes.to_vec()).map_err(|_| AuthError::Malformed("a name is not UTF-8"))
}

/// The components of a `PrincipalName` (5.2.2). Its type is only a hint.
fn name(value: &[u8]) -> Result<Vec<String>, AuthError> {
    let mut fields = sequence(value)?;
    let _type = fields.expect(context(0))?;
    let mut list = sequence(fields.expect(context(1))?)?;
    fields.finish()?;
    let mut components = Vec::new();
    while !list.is_empty() {
        if components.len() == COMPONENTS_MAX {
            return Err(AuthError::Malformed("a name of too many components"));
        }
        components.push(string(list.expect_whole(der::GENERAL_STRING)?)?);
    }
    Ok(components)
}

fn key(value: &[u8]) -> Result<Key, AuthError> {
    let mut fields = sequence(value)?;
    let etype = int32(fields.expect(context(0))?)?;
    let bytes = Zeroizing::new(der::only(fields.expect(context(1))?, der::OCTET_STRING)?.to_vec());
    fields.finish()?;
    let etype = EncryptionType::from_number(etype).ok_or_else(|| {
        AuthError::Refused(format!("the session key is of encryption type {etype}, which is not accepted"))
    })?;
    Key::new(etype, &bytes).ok_or(AuthError::Malformed("a key of the wrong length"))
}

/// At least 32 bits; only the first 32 are used.
fn bits(value: &[u8]) -> Result<Bits, AuthError> {
    match der::only(value, der::BIT_STRING)? {
        [_unused, a, b, c, d, ..] => Ok(Bits(u32::from_be_bytes([*a, *b, *c, *d]))),
        _ => Err(AuthError::Malformed("flags of less than 32 bits")),
    }
}

/// AD-IF-RELEVANT (5.2.6.1).
const IF_RELEVANT: i32 = 1;

/// 5.2.6: the server refuses restrictions that it does not know and must not ignore. Restrictions that it may ignore are
/// enclosed in AD-IF-RELEVANT, like the PAC of Active Directory.
fn only_what_may_be_ignored(data: Option<&[u8]>) -> Result<(), AuthError> {
    let Some(data) = data else { return Ok(()) };
    let mut list = sequence(data)?;
    while !list.is_empty() {
        let mut element = Reader::new(list.expect(der::SEQUENCE)?);
        let kind = int32(element.expect(context(0))?)?;
        if kind != IF_RELEVANT {
            return Err(AuthError::Refused(format!("there is a restriction of the unknown type {kind}")));
        }
        let _data = element.expect(context(1))?;
        element.finish()?;
    }
    Ok(())
}

/// A `KerberosTime` (5.2.3), YYYYMMDDHHMMSSZ.
fn time(value: &[u8]) -> Result<i64, AuthError> {
    const WRONG: AuthError = AuthError::Malformed("a time that is none");
    let text = der::only(value, der::GENERALIZED_TIME)?;
    let (digits, zone) = text.split_at_checked(14).ok_or(WRONG)?;
    if zone != b"Z" || !digits.iter().all(u8::is_ascii_digit) {
        return Err(WRONG);
    }
    let part = |range: std::ops::Range<usize>| {
        digits[range].iter().fold(0i64, |number, digit| number * 10 + i64::from(digit - b'0'))
    };
    let (year, month, day) = (part(0..4), part(4..6), part(6..8));
    let (hour, minute, second) = (part(8..10), part(10..12), part(12..14));
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) || hour > 23 || minute > 59 || second > 60 {
        return Err(WRONG);
    }
    Ok(days_before(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second)
}

/// Days since 1970-01-01, in the Gregorian calendar. Years are counted from March, so that the leap day is their last.
fn days_before(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    year * 365 + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + day_of_year - 719_468
}

/// The inverse of [`days_before`].
fn date_of(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

pub(super) fn encode_time(time: i64) -> Vec<u8> {
    let (year, month, day) = date_of(time.div_euclid(86_400));
    let second = time.rem_euclid(86_400);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let text = format!("{year:04}{month:02}{day:02}{hour:02}{minute:02}{second:02}Z");
    der::encode(der::GENERALIZED_TIME, &[text.as_bytes()])
}

pub(super) fn encode_number(number: i64) -> Vec<u8> {
    let bytes = number.to_be_bytes();
    let superfluous = (0..7)
        .take_while(|at| {
            let sign = if bytes[at + 1] & 0x80 == 0 { 0 } else { 0xFF };
            bytes[*at] == sign
        })
        .count();
    der::encode(der::INTEGER, &[&bytes[superfluous..]])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generalized_time_round_trips_and_malformed_times_are_refused() {
        for (text, seconds) in [
            ("19700101000000Z", 0),
            ("20000229123456Z", 951_827_696),
            ("20261126235959Z", 1_795_737_599),
            ("21000301000000Z", 4_107_542_400),
            ("19691231235959Z", -1),
        ] {
            let value = der::encode(der::GENERALIZED_TIME, &[text.as_bytes()]);
            assert_eq!(time(&value), Ok(seconds), "{text}");
            assert_eq!(encode_time(seconds), value, "{text}");
        }
        for wrong in [
            "",
            "20261126235959",
            "20261126235959.5Z",
            "20261326000000Z",
            "2026112624x000Z",
            "20261126240000Z",
        ] {
            assert!(time(&der::encode(der::GENERALIZED_TIME, &[wrong.as_bytes()])).is_err(), "{wrong}");
        }
    }

    #[test]
    fn integers_round_trip_and_malformed_integers_are_refused() {
        for wanted in [0, 1, -1, 127, 128, -128, -129, 255, 256, 999_999, i64::MAX, i64::MIN] {
            assert_eq!(number(&encode_number(wanted)), Ok(wanted));
        }
        assert_eq!(encode_number(128), [2, 2, 0, 128]);
        assert_eq!(encode_number(-128), [2, 1, 128]);
        assert!(number(&[2, 0]).is_err());
        assert!(number(&[2, 9, 0, 0, 0, 0, 0, 0, 0, 0, 1]).is_err());
    }
}
