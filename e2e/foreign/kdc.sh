# kdc.sh FOLDER ADDRESS: creates the database of a realm in a folder. The KDC and the servers have this address. Standard input
# contains the users: a name and a password per line. There are servers with keys of each encryption type; their keys are in
# FOLDER/server.keytab. This root file system is also set up for clients; other machines need FOLDER/krb5.conf and FOLDER/hosts.
folder=$1 address=$2
mkdir -m 700 "$folder"
cd "$folder"
cat > krb5.conf <<CONF
[libdefaults]
    default_realm = FOREBAY.TEST
    dns_lookup_kdc = false
    dns_lookup_realm = false
    dns_canonicalize_hostname = false
    rdns = false
[realms]
    FOREBAY.TEST = {
        kdc = $address
    }
[domain_realm]
    .forebay.test = FOREBAY.TEST
CONF
cat > kdc.conf <<CONF
[kdcdefaults]
    kdc_listen = $address:88
    kdc_tcp_listen = $address:88
[realms]
    FOREBAY.TEST = {
        database_name = $folder/principal
        key_stash_file = $folder/stash
        acl_file = $folder/acl
    }
[logging]
    default = FILE:$folder/log
CONF
cp krb5.conf /etc/krb5.conf
export KRB5_KDC_PROFILE=$folder/kdc.conf

# Not from standard input, which contains the users.
admin() { kadmin.local -q "$*" < /dev/null; }
# The master key is random and exists only in its stash.
head -c 32 /dev/urandom | base64 > master
cat master master | kdb5_util create -s
rm master
while read -r user password; do
    printf '%s\n%s\n' "$password" "$password" | kadmin.local -q "addprinc $user"
done
# A user that the KDC has but the server does not.
printf 'stranger\nstranger\n' | kadmin.local -q "addprinc stranger"
for keys in server: aes128-sha1:aes128-cts-hmac-sha1-96 aes256-sha1:aes256-cts-hmac-sha1-96 \
    aes128-sha2:aes128-cts-hmac-sha256-128 aes256-sha2:aes256-cts-hmac-sha384-192; do
    name=${keys%%:*}.forebay.test etype=${keys#*:}
    echo "$address $name" >> hosts
    admin addprinc -randkey ${etype:+-e "$etype:normal"} "cifs/$name"
    # The KDC would choose AES-256 with SHA-1 for session keys.
    [ -z "$etype" ] || admin setstr "cifs/$name" session_enctypes "$etype"
    admin ktadd -k server.keytab ${etype:+-e "$etype:normal"} "cifs/$name"
done
# A server with keys that our server does not have.
echo "$address elsewhere.forebay.test" >> hosts
admin addprinc -randkey cifs/elsewhere.forebay.test
cat hosts >> /etc/hosts
