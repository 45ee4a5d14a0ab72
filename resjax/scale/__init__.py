"""How is the work spread over devices?"""
