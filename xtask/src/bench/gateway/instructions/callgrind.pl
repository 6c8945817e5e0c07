# Runs a command, usually valgrind, in which prctl(PR_GET_AUXV) is not supported, as before Linux 6.4.
#
# The system call returns the address of a vDSO that valgrind 3.19 has unmapped. Programs fall back to
# /proc/self/auxv, which valgrind edits.
use strict;
use warnings;

my ($prctl, $set_seccomp, $filter_mode, $set_no_new_privs, $get_auxv) = (157, 22, 2, 38, 0x41555856);
my @filter = (
    [0x20, 0, 0, 0],             # load the number of the system call
    [0x15, 0, 3, $prctl],        # another one: allow
    [0x20, 0, 0, 16],            # load the low half of its first argument
    [0x15, 0, 1, $get_auxv],     # another one: allow
    [0x06, 0, 0, 0x00050016],    # fail with EINVAL
    [0x06, 0, 0, 0x7fff0000],    # allow
);
my $code = join '', map { pack 'SCCL', @$_ } @filter;
my $program = pack 'Sx6P', scalar @filter, $code;
syscall($prctl, $set_no_new_privs, 1, 0, 0, 0) == 0 or die "PR_SET_NO_NEW_PRIVS: $!\n";
syscall($prctl, $set_seccomp, $filter_mode, $program, 0, 0) == 0 or die "PR_SET_SECCOMP: $!\n";
exec @ARGV or die "$ARGV[0]: $!\n";
